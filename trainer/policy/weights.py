"""The interface of a policy for publishing: its scores, its tensors and its files."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bridle.trainer.policy.compute import is_rounded
from bridle.trainer.policy.lora import save_adapters
from bridle.trainer.policy.model import (
    checkpoint_tensors,
    save_policy,
    score_sequence,
    vocabulary_size,
)

Probes = Sequence[NDArray[np.int64]]
"""Sequences of token ids."""
Scores = list[NDArray[np.float32]]
"""The logprobs of each sequence: of every token but the first, given those before it."""

_COMPUTING: Final = threading.Lock()
"""A lock for scoring. Several engines are checked at the same time, but a model whose experts have
adapters computes once at a time: PEFT puts them into the weights for as long as a forward pass
lasts."""


class Weights(Protocol):
    """The weights of a policy, in this process or elsewhere."""

    @property
    def vocabulary(self) -> int:
        """The number of token ids that the policy can be given."""

    @property
    def is_rounded(self) -> bool:
        """Return whether the policy computes in 16 bits."""

    def scores(self, probes: Probes) -> Scores:
        """Return the policy's scores of ``probes``, each computed alone."""

    def save(
        self,
        directory: Path,
        tokenizer_from: Path | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        types_from: Path | None = None,
    ) -> None:
        """Save the policy with :func:`bridle.trainer.policy.model.save_policy`."""

    def save_lora(self, directory: Path, base: Path) -> None:
        """Save the adapters with :func:`bridle.trainer.policy.lora.save_adapters`."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of :func:`bridle.trainer.policy.model.checkpoint_tensors`."""


class ModelWeights:
    """The weights of a model in this process."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @property
    def vocabulary(self) -> int:
        return vocabulary_size(self.model)

    @property
    def is_rounded(self) -> bool:
        return is_rounded(self.model)

    def scores(self, probes: Probes) -> Scores:
        with _COMPUTING, torch.no_grad():
            return [score_sequence(self.model, probe).float().cpu().numpy() for probe in probes]

    def save(
        self,
        directory: Path,
        tokenizer_from: Path | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        types_from: Path | None = None,
    ) -> None:
        save_policy(self.model, directory, tokenizer_from, tensors, types_from)

    def save_lora(self, directory: Path, base: Path) -> None:
        save_adapters(self.model, directory, base)

    def tensors(self) -> dict[str, Tensor]:
        return checkpoint_tensors(self.model)


Policy = nn.Module | Weights
"""A model, or an object that gives access to its weights."""


def weights_of(policy: Policy) -> Weights:
    return ModelWeights(policy) if isinstance(policy, nn.Module) else policy
