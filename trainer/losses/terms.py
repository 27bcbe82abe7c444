"""The numbers of each trained token that losses, importance weights and trust regions read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """The ``M`` trained tokens of a pack; ``float[M]`` unless stated otherwise."""

    logprobs: Tensor
    """``log π``, with a gradient."""
    old_logprobs: Tensor
    """``log π_old``"""
    behaviour_logprobs: Tensor
    """``log μ``, as the engine reported it."""
    advantages: Tensor
    weights: Tensor
    branches: Tensor
    """``int64[M]``: the branch a token belongs to. The branch is the *sequence* of every loss,
    weight and region that has one. All trained tokens of a branch stand in one pack, whatever is
    packed beside them and whichever process computes them, while a session's branches may stand in
    several. A token that branches share is trained in the first of them, and counts in that one
    alone."""
    reference_logprobs: Tensor | None = None
    """Logprobs under the reference policy, for the KL penalty."""
    entropies: Tensor | None = None
    """The entropy of the distribution that each token was predicted from, in nats. It has a
    gradient if the loss is marked by :func:`differentiates_entropy`."""


ENTROPY_GRADIENT: Final = "differentiates_entropy"
MarkedLoss = TypeVar("MarkedLoss", bound=Callable[..., Any])


def differentiates_entropy(loss: MarkedLoss) -> MarkedLoss:
    """Mark a loss that needs the gradient of :attr:`TokenTerms.entropies`.

    Other losses get entropies without a gradient, which saves the memory of a second distribution
    over the vocabulary.
    """
    setattr(loss, ENTROPY_GRADIENT, True)
    return loss


def branch_sums(values: Tensor, branches: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of ``values`` over each token's branch, and the branch's number of tokens.

    Both have shape ``[M]``. A branch's tokens must all be here.
    """
    _, places, counts = torch.unique(branches, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(counts), dtype=values.dtype, device=values.device)
    return sums.index_add(0, places, values)[places], counts[places]
