"""What of a session a policy has sampled itself, where several take part."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bridle.reconstruct.samples.sample import Episode, Sample
from bridle.trainer.batch.filters import MaskReason, masked


def of_policy(episode: Episode, name: str) -> Episode:
    """``episode`` with the tokens of other policies than ``name`` masked.

    The weights of the samples that it still trains sum to 1, and those of the others are 0, so that
    a session counts as much for a policy with a small part in it as for any other.
    """
    others = [sample.mask & _of_others(sample, name) for sample in episode.samples]
    if not any(other.any() for other in others):
        return episode
    own = masked(episode, others, MaskReason.OTHER_POLICY)
    kept = [sample.weight if sample.mask.any() else 0.0 for sample in own.samples]
    whole = sum(kept) or 1.0
    samples = tuple(
        replace(sample, weight=weight / whole)
        for sample, weight in zip(own.samples, kept, strict=True)
    )
    return replace(own, samples=samples)


def _of_others(sample: Sample, name: str) -> NDArray[np.bool_]:
    """``bool[T]``: where another policy has sampled the token."""
    # The last one is that of tokens that no call sampled.
    foreign = np.asarray([policy != name for policy in sample.policies] + [False], np.bool_)
    if not foreign.any():
        return np.zeros(len(sample.token_ids), np.bool_)
    found: NDArray[np.bool_] = foreign[sample.calls]
    return found
