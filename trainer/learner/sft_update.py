"""One optimizer update of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from bridle.store.records import TokenIds
from bridle.trainer.batch.packing import computed_tokens, longest_branch, make_packs
from bridle.trainer.config import SftConfig
from bridle.trainer.learner.optimizer import clip_and_step
from bridle.trainer.policy.model import score_idly, score_pack
from bridle.trainer.policy.sharding import share_of
from bridle.trainer.policy.sparse import require_within_index


@dataclass(frozen=True, slots=True)
class SftExample:
    """One sequence to learn."""

    token_ids: TokenIds
    """``uint32[T]``"""
    mask: NDArray[np.bool_]
    """``bool[T]``: token ``t`` is learned, predicted from ``token_ids[:t]``."""


@dataclass(frozen=True, slots=True)
class SftUpdate:
    """The result of one update."""

    loss: float
    """Mean negative log-likelihood of the batch's learned tokens before the update, nats."""
    tokens: int
    """Number of learned tokens in the batch."""
    grad_norm: float

    @classmethod
    def of_processes(cls, parts: Sequence[SftUpdate]) -> SftUpdate:
        """Combine the updates of several processes, each of which has a part of the loss."""
        return cls(sum(part.loss for part in parts), parts[0].tokens, parts[0].grad_norm)


def fit_batch(
    model: nn.Module, optimizer: Optimizer, batch: Sequence[SftExample], config: SftConfig
) -> SftUpdate:
    """Take one optimizer update, in which every learned token of the batch weighs the same."""
    packs = make_packs(batch, config.packing)
    # Before they are dealt out, so that every process refuses the same.
    require_within_index(model, max(map(longest_branch, packs), default=0))
    tokens = sum(len(pack.targets) for pack in packs)
    total = 0.0
    for pack in share_of(model).of(packs, computed_tokens):
        if pack is None:
            score_idly(model)
            continue
        scores = score_pack(model, pack, block_tokens=config.packing.block_tokens)
        loss = -scores.logprobs.sum() / tokens
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    step = clip_and_step(model, optimizer, config.optimizer.grad_clip)
    return SftUpdate(total, tokens, step.norm)
