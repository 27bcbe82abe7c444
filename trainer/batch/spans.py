"""Attention over a forest of tokens on a CPU, in parts that have no mask.

In depth-first order the descendants of a run of tokens stand right behind it. So a pack is cut into
runs of at most a block of tokens, and its attention is two kinds of parts: each run's own causal
attention, and attention of all the run's descendants to the whole run, a rectangle that needs no
mask. Short runs of a tree's trunk share a rectangle of gathered keys. A query's parts are merged by
their log-sum-exp, as ring attention does (Liu et al. 2023, arXiv 2310.01889); the backward pass
gives each part's kernel the merged output and log-sum-exp, which makes its gradients those of the
whole. Small subtrees share one part with a mask, where parts of their own would cost more than the
mask.

In the last layer of a model only the outputs of tokens that predict something are read, so the
queries of all other tokens are left out there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from bridle.trainer.batch.forest import subtree_ends

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

KEYS: Final = 480
"""Maximum number of keys of a part. The kernel computes scores 512 keys at a time, and is fastest
below that."""


@dataclass(frozen=True, slots=True)
class Part:
    """Attention of a slice of the queries to a slice of the keys."""

    queries: slice
    keys: slice | Tensor
    """The keys as a slice, or as the tokens ``int64[K]``."""
    diagonal: bool
    """True if the queries are the keys' own tokens; false if they are descendants, which see all
    keys."""
    mask: Tensor | None = None
    """``float[queries, keys]`` of a diagonal part that is no line: 0 or ``-inf``."""


@dataclass(frozen=True, slots=True)
class Spans:
    """The parts of a pack's attention; the same for every head."""

    parts: tuple[Part, ...]
    """The parts, diagonal ones first; together the diagonal ones have each query once."""
    wanted: Tensor | None = None
    """``int64[W]``: the tokens whose queries are computed, which the parts' queries index. ``None``
    if all are computed."""


@dataclass(frozen=True, slots=True)
class TreeSpans:
    """The plan of a pack's attention in a whole model."""

    inner: Spans
    last: Spans
    """The parts of the last layer, with the queries of only those tokens whose output is read."""

    def of(self, module: torch.nn.Module) -> Spans:
        """Return the parts that an attention layer of Transformers computes."""
        config: Any = getattr(module, "config", None)
        layers = getattr(config, "num_hidden_layers", None)
        is_last = layers is not None and getattr(module, "layer_idx", None) == layers - 1
        return self.last if is_last else self.inner


def plan_tree_spans(
    parents: NDArray[np.int64],
    sources: NDArray[np.int64],
    block_tokens: int,
    dtype: torch.dtype = torch.float32,
) -> TreeSpans:
    """Plan the attention of a pack in a whole model.

    ``sources`` are the tokens whose output is read; ``dtype`` is that of the queries.
    """
    inner = plan_spans(parents, block_tokens, dtype)
    return TreeSpans(inner, only_wanted(inner, sources, dtype))


def plan_spans(
    parents: NDArray[np.int64], block_tokens: int, dtype: torch.dtype = torch.float32
) -> Spans:
    """Cut a pack into runs of at most ``block_tokens``; subtrees that small share a part."""
    ends = subtree_ends(parents)
    parts = list(_parts(parents, ends, block_tokens, dtype))
    return Spans(tuple(sorted(parts, key=lambda part: not part.diagonal)))


def _parts(
    parents: NDArray[np.int64], ends: NDArray[np.int64], block_tokens: int, dtype: torch.dtype
) -> Iterator[Part]:
    count = len(parents)
    follows = np.zeros(count, np.bool_)
    follows[1:] = (parents[1:] == np.arange(count - 1)) & (ends[1:] == ends[:-1])
    starts = np.append(np.flatnonzero(~follows), count)
    chained: dict[int, int] = {}
    start = 0
    while start < count:
        if start in chained:
            run = slice(start, chained.pop(start))
            yield Part(run, run, True)
            start = run.stop
            continue
        stop = start
        while stop < count and ends[stop] - start <= block_tokens:
            stop = int(ends[stop])
        if stop > start:
            run = slice(start, stop)
            line = bool(follows[start + 1 : stop].all())
            yield Part(run, run, True, None if line else _mask(ends, run, dtype))
            start = stop
            continue
        chain = _chain(start, ends, starts, block_tokens)
        chained |= {run.start: run.stop for run in chain}
        yield from _descendants(chain, ends)


def _chain(
    start: int, ends: NDArray[np.int64], starts: NDArray[np.int64], block_tokens: int
) -> list[slice]:
    """Return runs of at most ``block_tokens`` each and ``KEYS`` together.

    The first begins at ``start``, each further one at the largest child of the one before, while
    its subtree exceeds a block.
    """
    chain: list[slice] = []
    room = KEYS
    while room and ends[start] - start > block_tokens:
        stop = int(starts[np.searchsorted(starts, start, side="right")])
        chain.append(slice(start, min(stop, start + min(block_tokens, room))))
        room -= chain[-1].stop - start
        start = chain[-1].stop
        if start == stop:
            children = [stop]
            while ends[children[-1]] < ends[stop - 1]:
                children.append(int(ends[children[-1]]))
            start = max(children, key=lambda child: int(ends[child]) - child)
    return chain


def _descendants(chain: Sequence[slice], ends: NDArray[np.int64]) -> Iterator[Part]:
    """Yield the attention to a chain of runs.

    Descendants of the last run attend to all runs; other descendants of a run attend to that run
    alone.
    """
    last = chain[-1]
    for run in chain[:-1]:
        yield Part(slice(run.stop, last.stop), run, False)
        if ends[last.start] < ends[run.start]:
            yield Part(slice(int(ends[last.start]), int(ends[run.start])), run, False)
    below = slice(last.stop, int(ends[last.start]))
    if below.stop == below.start:
        return
    if last.stop - chain[0].start == sum(run.stop - run.start for run in chain):
        yield Part(below, slice(chain[0].start, last.stop), False)
    else:
        keys = np.concatenate([np.arange(run.start, run.stop) for run in chain])
        yield Part(below, torch.from_numpy(keys), False)


def _mask(ends: NDArray[np.int64], run: slice, dtype: torch.dtype) -> Tensor:
    tokens = np.arange(run.start, run.stop)
    seen = (tokens[None, :] <= tokens[:, None]) & (tokens[:, None] < ends[run][None, :])
    mask = torch.zeros(seen.shape, dtype=dtype)
    return mask.masked_fill_(torch.from_numpy(~seen), -torch.inf)


def only_wanted(spans: Spans, sources: NDArray[np.int64], dtype: torch.dtype) -> Spans:
    """Return the same plan with the queries of ``sources`` alone."""
    wanted = np.unique(sources)
    parts = []
    for part in spans.parts:
        start, stop = np.searchsorted(wanted, [part.queries.start, part.queries.stop]).tolist()
        mask = part.mask
        if part.diagonal and stop - start < part.queries.stop - part.queries.start:
            rows = torch.from_numpy(wanted[start:stop] - part.queries.start)
            whole = _line_mask(part.queries, dtype) if mask is None else mask
            mask = whole[rows]
        if stop > start:
            parts.append(Part(slice(start, stop), part.keys, part.diagonal, mask))
    return Spans(tuple(parts), torch.from_numpy(wanted))


def _line_mask(run: slice, dtype: torch.dtype) -> Tensor:
    tokens = run.stop - run.start
    return torch.full((tokens, tokens), -torch.inf, dtype=dtype).triu_(1)


def span_attention(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float | None = None
) -> Tensor:
    """Compute attention of ``query`` to ``key`` and ``value``.

    ``query`` is ``[1, H, N, D]``, ``key`` is ``[1, G, N, D]`` and ``value`` is ``[1, G, N, E]``,
    with ``G | H``. Returns ``[1, H, N, E]``, zero for a token whose query is not wanted.
    """
    size, width = query.shape[-1], value.shape[-1]
    if size != width:
        # The kernel takes one size (DeepSeek's latent attention has two); zeros change no score.
        scale = size**-0.5 if scale is None else scale
        largest = max(size, width)
        query, key, value = (
            pad(each, (0, largest - each.shape[-1])) for each in (query, key, value)
        )
        return span_attention(query, key, value, spans, scale)[..., :width]
    if torch.is_autocast_enabled(query.device.type):
        computed = torch.get_autocast_dtype(query.device.type)
        query, key, value = (each.to(computed) for each in (query, key, value))
    if spans.wanted is None:
        merged: Tensor = _SpanAttention.apply(query, key, value, spans.parts, scale)  # type: ignore[no-untyped-call]
        return merged
    queries = query.index_select(2, spans.wanted)
    found = _SpanAttention.apply(queries, key, value, spans.parts, scale)  # type: ignore[no-untyped-call]
    return torch.zeros_like(query).index_copy(2, spans.wanted, found)


def _by_group(heads: Tensor, groups: int) -> Tensor:
    """Return ``[1, H, N, D]`` as ``[H / G, G, N, D]``, so that keys need no copy for each head."""
    _, count, tokens, size = heads.shape
    return heads.view(groups, count // groups, tokens, size).transpose(0, 1)


def _taken(each: Tensor, part: Part, copies: int) -> Tensor:
    """Return a part's keys or values, for each head of their group without a copy."""
    return each[:, :, part.keys].expand(copies, -1, -1, -1)


class _SpanAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        parts: tuple[Part, ...],
        scale: float | None,
    ) -> Tensor:
        groups = key.shape[1]
        queries = _by_group(query, groups)
        exact = torch.promote_types(query.dtype, torch.float32)
        output = torch.empty(queries.shape, dtype=exact)
        sums = torch.empty(queries.shape[:-1], dtype=exact)
        for part in parts:
            found, logsumexp = _attend(
                queries[:, :, part.queries],
                _taken(key, part, len(queries)),
                _taken(value, part, len(queries)),
                0.0,
                part.diagonal and part.mask is None,
                attn_mask=part.mask,
                scale=scale,
            )
            whole, total = output[:, :, part.queries], sums[:, :, part.queries]
            if part.diagonal:
                whole.copy_(found)
                total.copy_(logsumexp)
                continue
            # The merged output is a + (b - a) * share, where share is b's part of both sums.
            share = torch.sigmoid(logsumexp - total)[..., None]
            whole.lerp_(found.to(exact), share)
            torch.logaddexp(total, logsumexp, out=total)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.parts, ctx.scale = parts, scale
        return output.transpose(0, 1).reshape(query.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums = ctx.saved_tensors
        groups = key.shape[1]
        queries, grads = _by_group(query, groups), _by_group(grad_output, groups)
        grad_query = torch.zeros_like(output, dtype=sums.dtype)
        grad_key, grad_value = (
            torch.zeros_like(each[0], dtype=sums.dtype) for each in (key, value)
        )
        for part in ctx.parts:
            of_query, of_key, of_value = _attend_backward(
                grads[:, :, part.queries],
                queries[:, :, part.queries],
                _taken(key, part, len(queries)),
                _taken(value, part, len(queries)),
                output[:, :, part.queries],
                sums[:, :, part.queries],
                0.0,
                part.diagonal and part.mask is None,
                attn_mask=part.mask,
                scale=ctx.scale,
            )
            grad_query[:, :, part.queries] += of_query
            grad_key[:, part.keys] += of_key.sum(0)
            grad_value[:, part.keys] += of_value.sum(0)
        return (
            grad_query.transpose(0, 1).reshape(query.shape).to(query.dtype),
            grad_key[None].to(key.dtype),
            grad_value[None].to(value.dtype),
            None,
            None,
        )
