"""The part of a session that one policy has sampled, where several take part."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bridle.reconstruct.samples.sample import Episode, Sample
from bridle.trainer.batch.filters import MaskReason, masked


def of_policy(episode: Episode, name: str) -> Episode:
    """Return ``episode`` with the tokens of other policies than ``name`` masked.

    A session counts as much for a policy with a small part in it as for any other: its weight is
    spread over the tokens that are left (:mod:`bridle.trainer.credit.weighting`).
    """
    others = [sample.mask & _of_others(sample, name) for sample in episode.samples]
    return masked(episode, others, MaskReason.OTHER_POLICY)


def _of_others(sample: Sample, name: str) -> NDArray[np.bool_]:
    """Return a mask ``bool[T]`` of the tokens that another policy sampled."""
    # The last one is that of tokens that no call sampled.
    foreign = np.asarray([policy != name for policy in sample.policies] + [False], np.bool_)
    if not foreign.any():
        return np.zeros(len(sample.token_ids), np.bool_)
    found: NDArray[np.bool_] = foreign[sample.calls]
    return found
