"""Attention over a forest of tokens in blocks with small masks, on any device.

The dense mask of ``N`` tokens has ``N²`` entries, nearly all of them false. Here queries go in
blocks of consecutive tokens. Because a pack is in depth-first order, a block can see only itself
and the ancestors of its first token. A block of ``B`` queries at depth ``D`` therefore needs
``D + B`` keys and one small mask: time and memory are ``O(N (D + B))``. In a layer with a window
of ``w`` positions ``D`` is at most about ``w``. A tree's first branch is a block of its own,
computed as plain causal attention without a mask. Each block is one call of PyTorch's
``scaled_dot_product_attention``, or of :mod:`bridle.trainer.batch.scored` where scores have soft
caps or sinks; gradients are autograd's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bridle.trainer.batch.forest import Reach, subtree_ends
from bridle.trainer.batch.scored import scored_attention


@dataclass(frozen=True, slots=True)
class TreeBlocks:
    """The plan of a pack's attention; the same for every layer and head."""

    queries: tuple[int, ...]
    """Tokens per block, in order; they sum to ``N``."""
    masks: tuple[Tensor | None, ...]
    """Mask of each block, ``float[queries, keys]``: 0 where the query may see the key, else
    ``-inf``. ``None`` if the block is a line from a root, whose keys are its own tokens."""
    keys: Tensor
    """``int64[K]``: key tokens of the blocks that have a mask, one block after another."""
    key_counts: tuple[int, ...]
    """Number of keys of each block that has a mask; they sum to ``K``."""


def plan_blocks(
    parents: NDArray[np.int64],
    block_tokens: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    reach: Reach | None = None,
) -> TreeBlocks:
    """Cut a pack into blocks of ``block_tokens`` queries, or more where the tree is deep.

    A block at depth ``D`` has at least ``D / 4`` queries: its ``D`` ancestors are gathered once per
    block, and this bounds the gathered keys by ``5 N``. Lines from a root that are shorter than
    ``block_tokens`` share blocks. ``dtype`` should be that of the queries, because masks of another
    type would be converted in every layer. With a ``reach`` a block's keys are those that one of
    its queries sees, and every block has a mask.
    """
    ends = subtree_ends(parents)
    lines = dict(_long_lines(parents, block_tokens)) if reach is None else {}
    line_starts = [*lines, len(parents)]
    queries: list[int] = []
    keys: list[NDArray[np.int64]] = []
    masks: list[Tensor | None] = []
    start = 0
    while start < len(parents):
        if start in lines:
            queries.append(lines[start] - start)
            masks.append(None)
            start = lines[start]
            line_starts.pop(0)
            continue
        ancestors = np.flatnonzero(ends[:start] > start)
        near = len(ancestors)
        if reach is not None:
            near = int((reach.positions[ancestors] >= reach.firsts[start]).sum())
        stop = min(line_starts[0], start + max(block_tokens, near // 4))
        block = np.arange(start, stop)
        seen = np.concatenate([ancestors, block])
        mask = (seen[None, :] <= block[:, None]) & (block[:, None] < ends[seen][None, :])
        if reach is not None:
            mask &= reach.positions[seen][None, :] >= reach.firsts[block][:, None]
            seen, mask = seen[mask.any(axis=0)], mask[:, mask.any(axis=0)]
        queries.append(stop - start)
        keys.append(seen)
        nothing = torch.zeros(mask.shape, dtype=dtype, device=device)
        masks.append(nothing.masked_fill_(torch.from_numpy(~mask).to(device), -torch.inf))
        start = stop
    return TreeBlocks(
        queries=tuple(queries),
        masks=tuple(masks),
        keys=torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *keys])).to(device),
        key_counts=tuple(len(seen) for seen in keys),
    )


def _long_lines(parents: NDArray[np.int64], least: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each line from a root that has at least ``least`` tokens."""
    breaks = np.flatnonzero(parents != np.arange(-1, len(parents) - 1))
    starts = np.union1d(breaks, [0])
    for start, stop in pairwise([*starts.tolist(), len(parents)]):
        if parents[start] < 0 and stop - start >= least:
            yield start, stop


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: TreeBlocks,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention of ``query`` to ``key`` and ``value``.

    ``query`` is ``[1, H, N, D]``, ``key`` is ``[1, G, N, D]`` and ``value`` is ``[1, G, N, E]``,
    with ``G | H``; ``sinks`` is ``[H]``. Returns ``[1, H, N, E]``.
    """
    queries = torch.split(query, list(blocks.queries), dim=2)
    own = [torch.split(each, list(blocks.queries), dim=2) for each in (key, value)]
    gathered = [
        iter(torch.split(each.index_select(2, blocks.keys), list(blocks.key_counts), dim=2))
        for each in (key, value)
    ]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    outputs = []
    for number, (block, mask) in enumerate(zip(queries, blocks.masks, strict=True)):
        keys, values = (
            parts[number] if mask is None else next(rest)
            for parts, rest in zip(own, gathered, strict=True)
        )
        if softcap is None and sinks is None:
            outputs.append(_plain_attention(block, keys, values, mask, scale))
        else:
            outputs.append(scored_attention(block, keys, values, mask, scale, softcap, sinks))
    return torch.cat(outputs, dim=2)


def _plain_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    repeat = query.shape[1] // key.shape[1]
    return scaled_dot_product_attention(
        query,
        key.repeat_interleave(repeat, dim=1) if repeat > 1 else key,
        value.repeat_interleave(repeat, dim=1) if repeat > 1 else value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )
