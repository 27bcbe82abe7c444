"""Attention over a forest of tokens: each token sees its ancestors and itself.

The dense mask of ``N`` tokens has ``N²`` entries, nearly all of them false. Here queries go in
blocks of consecutive tokens. Because a pack is in depth-first order, all that a block can see is
the block itself and the ancestors of its first token, so a block of ``B`` queries at depth ``D``
needs ``D + B`` keys and one small mask: time and memory are ``O(N (D + B))``. Each block is one
call of PyTorch's ``scaled_dot_product_attention``; gradients are autograd's.

Registered with Transformers as the attention implementation :data:`TREE_ATTENTION`; models that
take ``attn_implementation`` and hand keyword arguments down to attention (Llama, Qwen, Mistral …)
are called with ``tree_blocks=``. Without it the function falls back to Transformers' own SDPA, so
that the same model also generates and takes padded rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

TREE_ATTENTION: Final = "bridle_tree"


@dataclass(frozen=True, slots=True)
class TreeBlocks:
    """The plan of a pack's attention; the same for every layer and head."""

    queries: tuple[int, ...]
    """Tokens per block, in order; they sum to ``N``."""
    keys: Tensor
    """``int64[K]``: key tokens of all blocks, one block after another."""
    key_counts: tuple[int, ...]
    """Keys per block; they sum to ``K``."""
    masks: tuple[Tensor, ...]
    """Per block ``bool[queries, keys]``: true where the query may see the key."""


def subtree_ends(parents: NDArray[np.int64]) -> NDArray[np.int64]:
    """``int64[N]``: index behind the last token of each token's subtree.

    ``parents`` is in depth-first order. Token ``k`` is an ancestor of ``q``, or ``q`` itself, iff
    ``k <= q < ends[k]``.
    """
    ends = list(range(1, len(parents) + 1))
    for token in range(len(parents) - 1, 0, -1):
        parent = int(parents[token])
        if parent >= 0 and ends[token] > ends[parent]:
            ends[parent] = ends[token]
    return np.asarray(ends, dtype=np.int64)


def ancestor_mask(parents: NDArray[np.int64]) -> NDArray[np.bool_]:
    """``bool[N, N]``: row ``q``, column ``k``: ``k`` is ``q`` or its ancestor. For small ``N``."""
    ends = subtree_ends(parents)
    tokens = np.arange(len(parents))
    return (tokens[None, :] <= tokens[:, None]) & (tokens[:, None] < ends[None, :])


def plan_blocks(
    parents: NDArray[np.int64], block_tokens: int, device: torch.device | str = "cpu"
) -> TreeBlocks:
    """Cut a pack into blocks of ``block_tokens`` queries, or more where the tree is deep.

    A block at depth ``D`` has at least ``D / 4`` queries: its ``D`` ancestors are gathered once per
    block, and this bounds what is gathered by ``5 N`` keys.
    """
    ends = subtree_ends(parents)
    queries: list[int] = []
    keys: list[NDArray[np.int64]] = []
    masks: list[Tensor] = []
    start = 0
    while start < len(parents):
        ancestors = np.flatnonzero(ends[:start] > start)
        stop = min(len(parents), start + max(block_tokens, len(ancestors) // 4))
        block = np.arange(start, stop)
        seen = np.concatenate([ancestors, block])
        mask = (seen[None, :] <= block[:, None]) & (block[:, None] < ends[seen][None, :])
        queries.append(stop - start)
        keys.append(seen)
        masks.append(torch.from_numpy(mask).to(device))
        start = stop
    return TreeBlocks(
        queries=tuple(queries),
        keys=torch.from_numpy(np.concatenate(keys)).to(device),
        key_counts=tuple(len(seen) for seen in keys),
        masks=tuple(masks),
    )


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, blocks: TreeBlocks, scale: float | None = None
) -> Tensor:
    """Attention of ``query`` ``[1, H, N, D]`` to ``key``, ``value`` ``[1, G, N, D]``, ``G | H``.

    Returns ``[1, H, N, D]``.
    """
    repeat = query.shape[1] // key.shape[1]
    gathered_keys = torch.split(key.index_select(2, blocks.keys), list(blocks.key_counts), dim=2)
    gathered_values = torch.split(
        value.index_select(2, blocks.keys), list(blocks.key_counts), dim=2
    )
    outputs = [
        scaled_dot_product_attention(
            queries,
            keys.repeat_interleave(repeat, dim=1) if repeat > 1 else keys,
            values.repeat_interleave(repeat, dim=1) if repeat > 1 else values,
            attn_mask=mask,
            scale=scale,
        )
        for queries, keys, values, mask in zip(
            torch.split(query, list(blocks.queries), dim=2),
            gathered_keys,
            gathered_values,
            blocks.masks,
            strict=True,
        )
    ]
    return torch.cat(outputs, dim=2)


def _transformers_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    tree_blocks: TreeBlocks | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The signature that Transformers calls; returns ``[batch, tokens, heads, dim]``."""
    if kwargs.get("softcap") or kwargs.get("s_aux") is not None:
        raise ValueError("attention with soft caps or sinks is not supported by the trainer")
    if tree_blocks is None:
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return output
    if kwargs.get("sliding_window") is not None:
        raise ValueError("tree attention has no sliding window: use PackingConfig(layout='padded')")
    attended = tree_attention(query, key, value, tree_blocks, scaling)
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(TREE_ATTENTION, _transformers_attention)
AttentionMaskInterface.register(TREE_ATTENTION, sdpa_mask)
