"""Attention over a forest of tokens: each token sees its ancestors and itself.

A CPU computes it in parts without masks (:mod:`bridle.trainer.batch.spans`), and a CUDA device in
16 bits uses FlexAttention (:mod:`bridle.trainer.batch.flex`). FlexAttention takes minutes to
compile for float32, so CUDA in float32, like other devices, uses the blocks with small masks that
this module implements.

The dense mask of ``N`` tokens has ``N²`` entries, nearly all of them false. Here queries go in
blocks of consecutive tokens. Because a pack is in depth-first order, a block can see only itself
and the ancestors of its first token. A block of ``B`` queries at depth ``D`` therefore needs
``D + B`` keys and one small mask: time and memory are ``O(N (D + B))``. A tree's first branch is a
block of its own, computed as plain causal attention without a mask. Each block is one call of
PyTorch's ``scaled_dot_product_attention``; gradients are autograd's.

The function is registered with Transformers as the attention implementation
:data:`TREE_ATTENTION`. Models that take ``attn_implementation`` and pass keyword arguments down to
attention (Llama, Qwen, Mistral …) are called with ``tree_plan=``. Without it the function falls
back to Transformers' own SDPA, so that the same model also generates and takes padded rows. Soft
caps and sinks are computed in rows (:mod:`bridle.trainer.batch.scored`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from bridle.trainer.batch.flex import TreeMask, flex_tree_attention, plan_mask
from bridle.trainer.batch.forest import subtree_ends
from bridle.trainer.batch.scored import scored_attention
from bridle.trainer.batch.spans import TreeSpans, plan_tree_spans, span_attention

TREE_ATTENTION: Final = "bridle_tree"


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


def plan_tree(
    parents: NDArray[np.int64],
    sources: NDArray[np.int64],
    block_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
) -> TreeSpans | TreeMask | TreeBlocks:
    """Return the attention plan that suits ``device``.

    ``sources`` are the tokens whose output is read.
    """
    if device.type == "cpu":
        return plan_tree_spans(parents, sources, block_tokens, dtype)
    if device.type == "cuda" and dtype in {torch.bfloat16, torch.float16}:
        return plan_mask(parents, device, dtype)
    return plan_blocks(parents, block_tokens, device, dtype)


def plan_blocks(
    parents: NDArray[np.int64],
    block_tokens: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> TreeBlocks:
    """Cut a pack into blocks of ``block_tokens`` queries, or more where the tree is deep.

    A block at depth ``D`` has at least ``D / 4`` queries: its ``D`` ancestors are gathered once per
    block, and this bounds the gathered keys by ``5 N``. Lines from a root that are shorter than
    ``block_tokens`` share blocks. ``dtype`` should be that of the queries, because masks of another
    type would be converted in every layer.
    """
    ends = subtree_ends(parents)
    lines = dict(_long_lines(parents, block_tokens))
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
        stop = min(line_starts[0], start + max(block_tokens, len(ancestors) // 4))
        block = np.arange(start, stop)
        seen = np.concatenate([ancestors, block])
        mask = (seen[None, :] <= block[:, None]) & (block[:, None] < ends[seen][None, :])
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
    query: Tensor, key: Tensor, value: Tensor, blocks: TreeBlocks, scale: float | None = None
) -> Tensor:
    """Compute attention of ``query`` to ``key`` and ``value``.

    ``query`` is ``[1, H, N, D]``; ``key`` and ``value`` are ``[1, G, N, D]``, with ``G | H``.
    Returns ``[1, H, N, D]``.
    """
    repeat = query.shape[1] // key.shape[1]
    queries = torch.split(query, list(blocks.queries), dim=2)
    own = [torch.split(each, list(blocks.queries), dim=2) for each in (key, value)]
    gathered = [
        iter(torch.split(each.index_select(2, blocks.keys), list(blocks.key_counts), dim=2))
        for each in (key, value)
    ]
    outputs = []
    for number, (block, mask) in enumerate(zip(queries, blocks.masks, strict=True)):
        keys, values = (
            parts[number] if mask is None else next(rest)
            for parts, rest in zip(own, gathered, strict=True)
        )
        outputs.append(
            scaled_dot_product_attention(
                block,
                keys.repeat_interleave(repeat, dim=1) if repeat > 1 else keys,
                values.repeat_interleave(repeat, dim=1) if repeat > 1 else values,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
            )
        )
    return torch.cat(outputs, dim=2)


def _transformers_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    tree_plan: TreeSpans | TreeMask | TreeBlocks | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the signature that Transformers calls.

    Return ``[batch, tokens, heads, dim]``.
    """
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if softcap is not None or sinks is not None:
        if tree_plan is not None:
            raise ValueError("attention with soft caps or sinks goes in rows")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        scored = scored_attention(query, key, value, attention_mask, scale, softcap, sinks)
        return scored.transpose(1, 2).contiguous(), None
    if tree_plan is None:
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return output
    if kwargs.get("sliding_window") is not None:
        raise ValueError("tree attention has no sliding window: use PackingConfig(layout='padded')")
    if isinstance(tree_plan, TreeSpans):
        attended = span_attention(query, key, value, tree_plan.of(module), scaling)
    elif isinstance(tree_plan, TreeMask):
        attended = flex_tree_attention(query, key, value, tree_plan, scaling)
    else:
        attended = block_attention(query, key, value, tree_plan, scaling)
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(TREE_ATTENTION, _transformers_attention)
AttentionMaskInterface.register(TREE_ATTENTION, sdpa_mask)
