"""Ancestry in a forest whose tokens are in depth-first order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Reach:
    """The ancestors that tokens see in layers with a window or in chunks."""

    positions: NDArray[np.int64]
    """``int64[N]``: depth of each token in its branch, from 0."""
    firsts: NDArray[np.int64]
    """``int64[N]``: the smallest position of an ancestor that the token sees."""


def subtree_ends(parents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index behind the last token of each token's subtree, ``int64[N]``.

    ``parents`` is in depth-first order. Token ``k`` is an ancestor of ``q``, or ``q`` itself, iff
    ``k <= q < ends[k]``.
    """
    ends = list(range(1, len(parents) + 1))
    for token in range(len(parents) - 1, 0, -1):
        parent = int(parents[token])
        if parent >= 0 and ends[token] > ends[parent]:
            ends[parent] = ends[token]
    return np.asarray(ends, dtype=np.int64)
