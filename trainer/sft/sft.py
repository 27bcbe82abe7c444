"""Supervised fine-tuning: mean negative log-likelihood of masked tokens, with a progress bar."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from bridle.trainer.config import SftConfig
from bridle.trainer.learner.learner import AnyLearner
from bridle.trainer.learner.optimizer import learning_rate
from bridle.trainer.learner.rates import resolved
from bridle.trainer.learner.sft_update import SftExample
from bridle.trainer.sft.data import SftDataError


@dataclass(frozen=True, slots=True)
class SftStep:
    """One optimizer update."""

    step: int
    """Number of the step, from 0."""
    steps: int
    """Number of steps of the whole training."""
    loss: float
    """Mean negative log-likelihood of the batch's learned tokens before the update, nats."""
    tokens: int
    """Number of learned tokens in the batch."""
    grad_norm: float
    learning_rate: float

    def metrics(self) -> dict[str, float]:
        return {
            "sft/loss": self.loss,
            "sft/tokens": float(self.tokens),
            "sft/grad_norm": self.grad_norm,
            "sft/learning_rate": self.learning_rate,
        }


def train_sft(
    learner: AnyLearner,
    examples: Sequence[SftExample],
    config: SftConfig,
    *,
    on_step: Callable[[SftStep], bool | None] = lambda _step: None,
    console: Console | None = None,
) -> list[SftStep]:
    """Train the policy of ``learner`` and return the steps.

    Every learned token of a batch weighs the same. ``on_step`` may return true to stop. With a
    ``console`` a progress bar is drawn there. Raises :class:`bridle.trainer.sft.data.SftDataError`
    if there is nothing to learn, or for a token id that the model does not have.
    """
    learnable = [example for example in examples if example.mask.any()]
    if not learnable:
        raise SftDataError("no example has a token to learn")
    largest, known = max(int(e.token_ids.max()) for e in learnable), learner.vocabulary
    if largest >= known:
        raise SftDataError(
            f"token id {largest} is beyond the {known} of the model's vocabulary: "
            "was this recorded with another model?"
        )
    config = resolved(replace(config, packing=learner.packing))
    total = steps_of(len(learnable), config.epochs, config.batch_size)
    history: list[SftStep] = []
    with _progress_bar(console) as progress:
        task = progress.add_task("SFT", total=total, loss="")
        for step, batch in enumerate(_batches(learnable, config)):
            rate = learning_rate(step, total, config.optimizer)
            update = learner.fit(batch, config, learning_rate=rate)
            history.append(SftStep(step, total, update.loss, update.tokens, update.grad_norm, rate))
            progress.update(task, advance=1, loss=f"loss {update.loss:.3f}")
            if on_step(history[-1]):
                break
    return history


def steps_of(examples: int, epochs: int, batch_size: int) -> int:
    """Return the number of optimizer updates that so many examples take."""
    return epochs * math.ceil(examples / batch_size)


def _batches(examples: Sequence[SftExample], config: SftConfig) -> Iterator[list[SftExample]]:
    for epoch in range(config.epochs):
        order = np.random.default_rng((config.seed, epoch)).permutation(len(examples))
        for start in range(0, len(order), config.batch_size):
            yield [examples[i] for i in order[start : start + config.batch_size]]


def _progress_bar(console: Console | None) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
        console=console,
        disable=console is None,
    )
