"""Tree attention in its plainest form, which packs are compared with, and samples to pack."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bridle.trainer.batch.forest import subtree_ends
from bridle.trainer.learner.sft_update import SftExample


def ancestor_mask(parents: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return ``bool[N, N]``, true where column ``k`` is row ``q`` or its ancestor.

    The mask is dense: for a small ``N`` only.
    """
    ends = subtree_ends(parents)
    tokens = np.arange(len(parents))
    return (tokens[None, :] <= tokens[:, None]) & (tokens[:, None] < ends[None, :])


def one_prompt(prompt: int, reply: int, count: int) -> list[SftExample]:
    """Return examples of random replies to the same random prompt, of these numbers of tokens."""
    generator = np.random.default_rng(0)
    start = generator.integers(0, 64, prompt)
    replies = (generator.integers(0, 64, reply) for _ in range(count))
    mask = np.arange(prompt + reply) >= prompt
    return [SftExample(np.concatenate([start, one]).astype(np.uint32), mask) for one in replies]
