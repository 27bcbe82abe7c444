"""The operations of a run on the policy that it trains.

:class:`Learner` performs all of them in this process. Under torchrun each rank has a
:class:`Learner` of its part, and :class:`bridle.trainer.learner.ranks.SpreadLearner` directs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from torch import nn

from bridle.trainer.batch.prepare import TrainItem
from bridle.trainer.config import GrpoConfig, PackingConfig, SftConfig
from bridle.trainer.learner.average import Average
from bridle.trainer.learner.checkpoint import Progress, load_checkpoint, save_checkpoint
from bridle.trainer.learner.optimizer import make_optimizer, set_learning_rate
from bridle.trainer.learner.rates import peak_rate
from bridle.trainer.learner.sft_update import SftExample, SftUpdate, fit_batch
from bridle.trainer.learner.update import UpdateStats, update_policy
from bridle.trainer.policy.compute import UnsupportedCompute
from bridle.trainer.policy.exactness import exact_packing
from bridle.trainer.policy.sharding import share_of
from bridle.trainer.policy.weights import ModelWeights, Weights


class AnyLearner(Weights, Protocol):
    """A policy in training, in this process or in others."""

    @property
    def packing(self) -> PackingConfig:
        """The packing of its samples: as configured, if that is exact (:func:`exact_packing`)."""

    @property
    def has_reference(self) -> bool:
        """Return whether there is a frozen policy for a KL penalty."""

    @property
    def average(self) -> Average | None:
        """The moving average of the policy, if that is its teacher."""

    def update(
        self,
        items: Sequence[TrainItem],
        config: GrpoConfig,
        *,
        step: int,
        version: int,
        learning_rate: float,
        entropy_bonus: float = 0.0,
    ) -> UpdateStats:
        """Take a step's updates (:func:`bridle.trainer.learner.update.update_policy`)."""

    def fit(
        self, batch: Sequence[SftExample], config: SftConfig, *, learning_rate: float
    ) -> SftUpdate:
        """Take an update (:func:`bridle.trainer.learner.sft_update.fit_batch`)."""

    def save_checkpoint(
        self, directory: Path, progress: Progress, *, tokenizer_from: Path | None, keep: int
    ) -> None:
        """Save a checkpoint with :func:`bridle.trainer.learner.checkpoint.save_checkpoint`."""

    def load_checkpoint(self, path: Path) -> Progress:
        """Load a checkpoint with :func:`bridle.trainer.learner.checkpoint.load_checkpoint`."""


class Learner(ModelWeights):
    """A learner of a model in this process, or of this process's part of one.

    ``reference`` is the policy of the KL penalty: a frozen model, or ``model`` itself, whose
    adapters are off while its logprobs are computed as the reference.
    """

    def __init__(
        self,
        model: nn.Module,
        config: GrpoConfig | SftConfig,
        reference: nn.Module | None = None,
    ) -> None:
        super().__init__(model)
        self.packing = exact_packing(model, config.packing)
        optimizer = replace(config.optimizer, learning_rate=peak_rate(config))
        self.optimizer = make_optimizer(model, optimizer)
        self.reference = reference
        self.average = average_of(model, config)

    @property
    def has_reference(self) -> bool:
        return self.reference is not None

    def update(
        self,
        items: Sequence[TrainItem],
        config: GrpoConfig,
        *,
        step: int,
        version: int,
        learning_rate: float,
        entropy_bonus: float = 0.0,
    ) -> UpdateStats:
        set_learning_rate(self.optimizer, learning_rate)
        stats = update_policy(
            self.model,
            self.optimizer,
            items,
            config,
            step=step,
            version=version,
            reference=self.reference,
            entropy_bonus=entropy_bonus,
        )
        if self.average is not None and stats.changed_weights:
            self.average.update(self.model)
        return stats

    def fit(
        self, batch: Sequence[SftExample], config: SftConfig, *, learning_rate: float
    ) -> SftUpdate:
        set_learning_rate(self.optimizer, learning_rate)
        return fit_batch(self.model, self.optimizer, batch, config)

    def save_checkpoint(
        self, directory: Path, progress: Progress, *, tokenizer_from: Path | None, keep: int
    ) -> None:
        save_checkpoint(
            directory,
            self.model,
            self.optimizer,
            progress,
            tokenizer_from=tokenizer_from,
            keep=keep,
            average=self.average,
        )

    def load_checkpoint(self, path: Path) -> Progress:
        return load_checkpoint(path, self.model, self.optimizer, self.average)


def average_of(model: nn.Module, config: GrpoConfig | SftConfig) -> Average | None:
    """Return the average that ``config`` makes the teacher of ``model``, or ``None``.

    Raise :class:`bridle.trainer.policy.compute.UnsupportedCompute` if the model is spread.
    """
    if isinstance(config, SftConfig) or config.distillation.teacher != "ema":
        return None
    if share_of(model).processes > 1:
        raise UnsupportedCompute(
            "a policy that is spread over devices has no average of itself: train on one with "
            "compute.device, or name a served teacher with distillation.url"
        )
    return Average(model, config.distillation.decay)
