"""Tree attention in its plainest form, which the packed forms are compared with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bridle.trainer.batch.forest import subtree_ends


def ancestor_mask(parents: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return ``bool[N, N]``, true where column ``k`` is row ``q`` or its ancestor.

    The mask is dense: for a small ``N`` only.
    """
    ends = subtree_ends(parents)
    tokens = np.arange(len(parents))
    return (tokens[None, :] <= tokens[:, None]) & (tokens[:, None] < ends[None, :])
