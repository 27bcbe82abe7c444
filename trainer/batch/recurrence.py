"""Recurrent layers over a forest of tokens: a state is forked where the tree branches.

A pack is cut into segments, runs of tokens without a branch. A segment begins in the state that its
parent segment ends in; all segments of one depth are computed together, as the rows of one call of
Transformers' own kernel. The short convolution before it takes each token's ancestors. So Gated
DeltaNet (Yang et al. 2025, arXiv 2412.06464) is exact in a tree, as used by Qwen3-Next, Qwen3.5
and OLMo Hybrid.

:func:`fork_states` wraps the two functions that those models' layers call; the wrapped functions
behave as before unless they are called with ``tree_states=``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.activations import ACT2FN

CHUNK: Final = 64
"""Number of tokens that the kernel computes at a time; a row takes a multiple of it."""
_CONVOLUTION: Final = "causal_conv1d_fn"
_DELTA_RULE: Final = "torch_chunk_gated_delta_rule"


@dataclass(frozen=True, slots=True)
class SegmentRows:
    """Segments of one depth and of similar length, computed together."""

    segments: tuple[int, ...]
    """The ``S`` segments."""
    parents: tuple[int, ...]
    """The parent segment of each, or -1 if there is none."""
    tokens: Tensor
    """``int64[S, L]``: index of each of their tokens in the pack; ``N`` behind a segment's end."""


@dataclass(frozen=True, slots=True)
class TreeStates:
    """The plan of a pack's recurrences; the same for every layer."""

    parents: Tensor
    """``int64[N + 1]``: the token before each on its branch; ``N``, which stands for no token, at a
    root and at ``N``."""
    rows: tuple[SegmentRows, ...]
    """The rows in order of depth."""
    places: Tensor
    """``int64[N]``: position of each token in the rows, laid end to end."""


def plan_states(parents: NDArray[np.int64], device: torch.device | str = "cpu") -> TreeStates:
    """Plan the recurrences of a pack.

    ``parents`` is ``int64[N]``, in depth-first order, -1 at a root.
    """
    count = len(parents)
    children = np.bincount(parents[parents >= 0], minlength=count)
    follows = (parents >= 0) & (children[parents] == 1)
    segment_of = np.cumsum(~follows) - 1
    starts = np.flatnonzero(~follows)
    lengths = np.diff(np.append(starts, count))
    before = np.where(parents[starts] >= 0, segment_of[parents[starts]], -1)
    depths = np.zeros(len(starts), np.int64)
    for segment, parent in enumerate(before):
        if parent >= 0:
            depths[segment] = depths[parent] + 1
    rows = []
    places = np.empty(count, np.int64)
    place = 0
    for segments in _alike(depths, lengths):
        longest = int(lengths[segments].max())
        tokens = starts[segments][:, None] + np.arange(longest)
        here = np.arange(longest) < lengths[segments][:, None]
        places[tokens[here]] = place + np.flatnonzero(here.reshape(-1))
        place += tokens.size
        rows.append(
            SegmentRows(
                segments=tuple(segments.tolist()),
                parents=tuple(before[segments].tolist()),
                tokens=torch.from_numpy(np.where(here, tokens, count)).to(device),
            )
        )
    no_token = np.append(np.where(parents >= 0, parents, count), count)
    return TreeStates(
        parents=torch.from_numpy(no_token).to(device),
        rows=tuple(rows),
        places=torch.from_numpy(places).to(device),
    )


def _alike(depths: NDArray[np.int64], lengths: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield segments of one depth, none of which takes more than twice the chunks of another."""
    chunks = -(-lengths // CHUNK)
    order = np.lexsort((chunks, depths))
    start = 0
    for stop in range(1, len(order) + 1):
        first = order[start]
        if (
            stop == len(order)
            or depths[order[stop]] != depths[first]
            or chunks[order[stop]] > 2 * chunks[first]
        ):
            yield order[start:stop]
            start = stop


def fork_states(model: nn.Module) -> None:
    """Let the layers of ``model`` that are a Gated DeltaNet take ``tree_states=``."""
    for name in {type(module).__module__ for module in model.modules()}:
        module = sys.modules[name]
        if hasattr(module, _CONVOLUTION) and hasattr(module, _DELTA_RULE):
            _put_before(module, _CONVOLUTION, _tree_convolution)
            _put_before(module, _DELTA_RULE, _tree_delta_rule)


def forks_states(model: nn.Module) -> bool:
    """Return whether layers of ``model`` take ``tree_states=``."""
    return any(
        hasattr(getattr(sys.modules[name], _DELTA_RULE, None), "plain")
        for name in {type(module).__module__ for module in model.modules()}
    )


def _put_before(module: Any, name: str, in_trees: Callable[..., Any]) -> None:
    plain = getattr(module, name)
    if hasattr(plain, "plain"):
        return

    @wraps(plain)
    def either(*args: Any, tree_states: TreeStates | None = None, **kwargs: Any) -> Any:
        if tree_states is None:
            return plain(*args, **kwargs)
        return in_trees(plain, tree_states, *args, **kwargs)

    either.plain = plain  # type: ignore[attr-defined]
    setattr(module, name, either)


def _tree_convolution(
    plain: Callable[..., Tensor],
    states: TreeStates,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute a depthwise convolution over each token and its ``K - 1`` ancestors.

    The input is ``[1, C, N]``, and ``weight`` is ``[C, K]``.
    """
    del plain, kwargs
    inputs = torch.nn.functional.pad(hidden_states.to(weight.dtype), (0, 1))
    ancestors = torch.arange(hidden_states.shape[-1], device=hidden_states.device)
    output = inputs[..., :-1] * weight[:, -1:]
    for distance in range(2, weight.shape[-1] + 1):
        ancestors = states.parents[ancestors]
        output = output + inputs[..., ancestors] * weight[:, -distance, None]
    if bias is not None:
        output = output + bias[:, None]
    if activation is not None:
        output = ACT2FN[activation](output)
    return output.to(hidden_states.dtype)


def _tree_delta_rule(
    plain: Callable[..., tuple[Tensor, Tensor]],
    states: TreeStates,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the delta rule on ``[1, N, heads, dim]``.

    Each segment starts from its parent's final state. Behind a segment's end keys, gates and
    ``beta`` are 0, which leaves a state as it is.
    """
    kwargs |= {"output_final_state": True}
    padded = [torch.cat([each[0], torch.zeros_like(each[0, :1])]) for each in (query, key, value)]
    gates = [torch.cat([each[0], torch.zeros_like(each[0, :1])]) for each in (g, beta)]
    ends: dict[int, Tensor] = {}
    outputs = []
    for rows in states.rows:
        # Only roots have no parent, and they are the segments of depth 0.
        kwargs["initial_state"] = (
            None if rows.parents[0] < 0 else torch.stack([ends[each] for each in rows.parents])
        )
        output, final = plain(
            *(each[rows.tokens] for each in padded),
            g=gates[0][rows.tokens],
            beta=gates[1][rows.tokens],
            **kwargs,
        )
        outputs.append(output.flatten(0, 1))
        ends.update(zip(rows.segments, final, strict=True))
    return torch.cat(outputs)[states.places][None], None
