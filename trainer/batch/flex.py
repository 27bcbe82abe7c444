"""Attention over a forest of tokens on a GPU: PyTorch's FlexAttention, with a mask made by rule.

FlexAttention skips blocks of keys that no query of a block sees, and looks at single tokens only
where a block is seen in part. In depth-first order, token ``k`` is seen by the tokens from itself
to the end of its subtree. The smallest and the largest of these ends in each block therefore decide
which blocks are seen, without the ``N²`` entries of a dense mask. Grouped keys are not copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad

from bridle.trainer.batch.forest import subtree_ends

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
    parents: NDArray[np.int64], device: torch.device | str, dtype: torch.dtype
) -> TreeMask:
    """Plan the blocks of keys that each block of queries sees, wholly or in part.

    Tokens are padded with roots to whole blocks, because the kernels for fewer tokens have no
    gradients.
    """
    size = -(-len(parents) // BLOCK) * BLOCK
    ends = subtree_ends(np.pad(parents, (0, size - len(parents)), constant_values=-1))
    starts = np.arange(0, size, BLOCK)
    earlier = np.tri(len(starts), k=-1, dtype=np.bool_)
    whole = earlier & (np.minimum.reduceat(ends, starts)[None, :] >= starts[:, None] + BLOCK)
    seen = earlier & (np.maximum.reduceat(ends, starts)[None, :] > starts[:, None])
    np.fill_diagonal(seen, val=True)
    on_device = torch.from_numpy(ends).to(device)

    def is_seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < on_device[key])

    mask = BlockMask.from_kv_blocks(
        *_listed(seen & ~whole, device),
        *_listed(whole, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=is_seen,
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


def flex_tree_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: TreeMask, scale: float | None = None
) -> Tensor:
    """Compute attention of ``query`` to ``key`` and ``value``.

    ``query`` is ``[1, H, N, D]``; ``key`` and ``value`` are ``[1, G, N, D]``, with ``G | H``.
    Returns ``[1, H, N, D]``.
    """
    attend = _compiled() if query.is_cuda else flex_attention
    tokens = query.shape[2]
    padding = (0, 0, 0, plan.mask.seq_lengths[0] - tokens)
    attended: Tensor = attend(
        *(pad(each.to(plan.dtype), padding) for each in (query, key, value)),
        block_mask=plan.mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended[:, :, :tokens]
