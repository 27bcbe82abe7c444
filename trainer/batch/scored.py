"""Attention whose scores PyTorch's own function does not compute: with soft caps, or with sinks.

A soft cap bounds a score before the softmax (Gemma 2). A sink is one more key for every query, with
a learned score for each head and nothing to add (gpt-oss). Both are computed a few queries at a
time, and recomputed for gradients, so that memory holds the scores of some queries only.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

QUERIES: Final = 256
"""Number of queries that are computed at a time."""


def scored_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention of ``query`` ``[B, H, N, D]`` to ``key``, ``value`` ``[B, G, K, D or E]``.

    ``G`` divides ``H``. ``mask`` ``[N, K]`` or ``[B or 1, H or 1, N, K]`` is true where a query may
    see a key, or is added to the scores. With ``None`` each of ``N = K`` tokens sees itself and the
    tokens before it. ``sinks`` is ``[H]``. Returns ``[B, H, N, E]``.
    """
    tokens = query.shape[2]
    outputs = []
    for start in range(0, tokens, QUERIES):
        stop = min(tokens, start + QUERIES)
        seen = stop if mask is None else key.shape[2]
        if mask is None:
            here = torch.ones(stop - start, seen, dtype=torch.bool, device=query.device)
            allowed = here.tril(diagonal=start)
        else:
            allowed = mask[..., start:stop, :seen]
        arguments = (
            query[:, :, start:stop],
            key[:, :, :seen],
            value[:, :, :seen],
            allowed,
            scale,
            softcap,
            sinks,
        )
        if torch.is_grad_enabled():
            outputs.append(checkpoint(_attended, *arguments, use_reentrant=False))
        else:
            outputs.append(_attended(*arguments))
    return torch.cat(outputs, dim=2)


def _attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    batch, heads, queries, size = query.shape
    groups = key.shape[1]
    grouped = query.reshape(batch, groups, heads // groups, queries, size)
    scores = (grouped @ key[:, :, None].transpose(-1, -2)).reshape(batch, heads, queries, -1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if allowed.dtype == torch.bool:
        scores = scores.masked_fill(~allowed, -torch.inf)
    else:
        scores = scores + allowed
    if sinks is not None:
        column = sinks.to(scores.dtype).reshape(1, heads, 1, 1).expand(batch, -1, queries, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    weights = weights.to(value.dtype).reshape(batch, groups, heads // groups, queries, -1)
    return (weights @ value[:, :, None]).reshape(batch, heads, queries, value.shape[-1])
