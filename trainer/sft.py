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
from torch import nn
from torch.optim import Optimizer

from trainer.config import SftConfig
from trainer.model import exact_packing, score_pack, vocabulary_size
from trainer.optimizer import clip_and_step, learning_rate, make_optimizer, set_learning_rate
from trainer.packing import make_packs
from trainer.sft_data import SftExample


@dataclass(frozen=True, slots=True)
class SftStep:
    """One optimizer update."""

    step: int
    """From 0."""
    steps: int
    """Of the whole training."""
    loss: float
    """Mean negative log-likelihood of the batch's learned tokens before the update, nats."""
    tokens: int
    """Learned tokens in the batch."""
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
    model: nn.Module,
    examples: Sequence[SftExample],
    config: SftConfig,
    *,
    on_step: Callable[[SftStep], bool | None] = lambda _step: None,
    console: Console | None = None,
) -> list[SftStep]:
    """Train ``model`` in place; returns its steps.

    Every learned token of a batch weighs the same. ``on_step`` may return true to stop. With a
    ``console`` a progress bar is drawn there. Raises ``ValueError`` when there is nothing to learn,
    or a token id that the model does not have.
    """
    learnable = [example for example in examples if example.mask.any()]
    if not learnable:
        raise ValueError("no example has a token to learn")
    largest, known = max(int(e.token_ids.max()) for e in learnable), vocabulary_size(model)
    if largest >= known:
        raise ValueError(
            f"token id {largest} is beyond the {known} of the model's vocabulary: "
            "was this recorded with another model?"
        )
    config = replace(config, packing=exact_packing(model, config.packing))
    optimizer = make_optimizer(model, config.optimizer)
    total = steps_of(len(learnable), config.epochs, config.batch_size)
    history: list[SftStep] = []
    with _progress_bar(console) as progress:
        task = progress.add_task("SFT", total=total, loss="")
        for step, batch in enumerate(_batches(learnable, config)):
            rate = learning_rate(step, total, config.optimizer)
            set_learning_rate(optimizer, rate)
            loss, tokens, norm = _train_batch(model, optimizer, batch, config)
            history.append(SftStep(step, total, loss, tokens, norm, rate))
            progress.update(task, advance=1, loss=f"loss {loss:.3f}")
            if on_step(history[-1]):
                break
    return history


def steps_of(examples: int, epochs: int, batch_size: int) -> int:
    """Optimizer updates that so many examples take."""
    return epochs * math.ceil(examples / batch_size)


def _batches(examples: Sequence[SftExample], config: SftConfig) -> Iterator[list[SftExample]]:
    for epoch in range(config.epochs):
        order = np.random.default_rng((config.seed, epoch)).permutation(len(examples))
        for start in range(0, len(order), config.batch_size):
            yield [examples[i] for i in order[start : start + config.batch_size]]


def _train_batch(
    model: nn.Module, optimizer: Optimizer, batch: Sequence[SftExample], config: SftConfig
) -> tuple[float, int, float]:
    """One update. Returns the mean loss, the learned tokens, and the gradient norm."""
    packs = make_packs(batch, [[index] for index in range(len(batch))], config.packing)
    tokens = sum(len(pack.targets) for pack in packs)
    total = 0.0
    for pack in packs:
        scores = score_pack(model, pack, block_tokens=config.packing.block_tokens)
        loss = -scores.logprobs.sum() / tokens
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    norm, _ = clip_and_step(model, optimizer, config.optimizer.grad_clip)
    return total, tokens, norm


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
