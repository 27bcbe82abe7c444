"""Attention over a forest of tokens on a GPU: PyTorch's FlexAttention, with a mask made by rule.

FlexAttention skips blocks of keys that no query of a block sees, and looks at single tokens only
where a block is seen in part. In depth-first order, token ``k`` is seen by the tokens from itself
to the end of its subtree. The smallest and the largest of these ends in each block therefore decide
which blocks are seen, without the ``N²`` entries of a dense mask. A window is a smallest position
that a query sees, and skips the blocks whose tokens all have smaller ones. Grouped keys are not
copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from bridle.trainer.batch.forest import Reach, subtree_ends

BLOCK: Final = 128
"""Number of tokens of a block, both of queries and of keys; it is FlexAttention's own default."""


@cache
def _compiled() -> Any:
    """Compile FlexAttention, which otherwise computes all ``N²`` scores.

    Compiling loads much of PyTorch, so it is done at first use.
    """
    return torch.compile(flex_attention, dynamic=True)


@dataclass(frozen=True, slots=True)
class TreeMask:
    """The plan of a pack's attention; the same for every layer and head."""

    mask: BlockMask
    dtype: torch.dtype
    """The type that queries, keys and values are converted to; under autocast they come in
    different types."""


def plan_mask(
    parents: NDArray[np.int64],
    device: torch.device | str,
    dtype: torch.dtype,
    reach: Reach | None = None,
) -> TreeMask:
    """Plan the blocks of keys that each block of queries sees, wholly or in part.

    Tokens are padded with roots to whole blocks, because the kernels for fewer tokens have no
    gradients.
    """
    size = -(-len(parents) // BLOCK) * BLOCK
    padding = (0, size - len(parents))
    ends = subtree_ends(np.pad(parents, padding, constant_values=-1))
    starts = np.arange(0, size, BLOCK)
    earlier = np.tri(len(starts), k=-1, dtype=np.bool_)
    whole = earlier & (np.minimum.reduceat(ends, starts)[None, :] >= starts[:, None] + BLOCK)
    seen = earlier & (np.maximum.reduceat(ends, starts)[None, :] > starts[:, None])
    on_device = torch.from_numpy(ends).to(device)

    def is_seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < on_device[key])

    rule = is_seen
    if reach is not None:
        positions, firsts = (np.pad(each, padding) for each in (reach.positions, reach.firsts))
        lowest, highest = (
            (
                extreme.reduceat(positions, starts)[None, :],
                extreme.reduceat(firsts, starts)[:, None],
            )
            for extreme in (np.minimum, np.maximum)
        )
        whole &= lowest[0] >= highest[1]
        seen &= highest[0] >= lowest[1]
        at, first = (torch.from_numpy(each).to(device) for each in (positions, firsts))

        def is_near(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return is_seen(_batch, _head, query, key) & (at[key] >= first[query])

        rule = is_near
    np.fill_diagonal(seen, val=True)
    mask = BlockMask.from_kv_blocks(
        *_listed(seen & ~whole, device),
        *_listed(whole, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=rule,
        seq_lengths=(size, size),
    )
    return TreeMask(mask, dtype)


def _listed(blocks: NDArray[np.bool_], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return the number of marked blocks in each row, and the row's blocks, marked ones first.

    The numbers are ``int32[1, 1, B]``, and the blocks ``int32[1, 1, B, B]``.
    """
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    counts = blocks.sum(axis=1, dtype=np.int32)
    return (
        torch.from_numpy(counts)[None, None].to(device),
        torch.from_numpy(order)[None, None].to(device),
    )


@cache
def _capped(softcap: float, device: torch.device) -> Any:
    """Return the change of scores, the same object for the same cap, which is compiled once.

    The cap is a tensor, because the kernel cannot be compiled with a number that it reads.
    """
    cap = torch.tensor(softcap, device=device)

    def capped(
        score: Tensor, _batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor
    ) -> Tensor:
        return torch.tanh(score / cap) * cap

    return capped


def flex_tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: TreeMask,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention of ``query`` to ``key`` and ``value``.

    ``query`` is ``[1, H, N, D]``, ``key`` is ``[1, G, N, D]`` and ``value`` is ``[1, G, N, E]``,
    with ``G | H``; ``sinks`` is ``[H]``. Returns ``[1, H, N, E]``.
    """
    attend = _compiled() if query.is_cuda else flex_attention
    tokens = query.shape[2]
    padding = (0, 0, 0, plan.mask.seq_lengths[0] - tokens)
    found = attend(
        *(pad(each.to(plan.dtype), padding) for each in (query, key, value)),
        score_mod=None if softcap is None else _capped(softcap, query.device),
        block_mask=plan.mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    if sinks is None:
        attended: Tensor = found
        return attended[:, :, :tokens]
    attended, sums = found[0][:, :, :tokens], found[1].lse[:, :, :tokens]
    # A sink takes its share of the softmax and adds nothing.
    share = torch.sigmoid(sums - sinks.to(sums.dtype)[None, :, None])
    return attended * share[..., None].to(attended.dtype)
