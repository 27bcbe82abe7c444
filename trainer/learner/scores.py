"""The scores of trained tokens, by the spans that sampled them, for the store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from bridle.reconstruct.samples.sample import Sample
from bridle.store.reading.conversation import ReplyId
from bridle.store.trained import SpanScores
from bridle.trainer.batch.packing import Index, Pack

Floats = NDArray[np.float32]


def span_scores(
    pack: Pack, samples: Sequence[Sample], logprobs: Floats, entropies: Floats, version: int
) -> list[SpanScores]:
    """Return the scores of a pack's targets, one record for each span of each sample.

    ``logprobs`` and ``entropies`` are ``float32[M]``, given by the weights of ``version``.
    ``samples`` are the packed ones.
    """
    found: list[SpanScores] = []
    for index in np.unique(pack.samples):
        sample, here = samples[index], np.flatnonzero(pack.samples == index)
        replies = sample.replies
        offsets = pack.offsets[here]
        owners = sample.calls[offsets]
        for call in np.unique(owners[owners >= 0]):
            own = here[owners == call]
            # A branch has a span from its first token on.
            begins = int(np.argmax(sample.calls == call))
            places = pack.offsets[own] - begins
            found.append(
                SpanScores(
                    replies[call].call_id,
                    replies[call].choice,
                    version,
                    _placed(logprobs[own], places),
                    _placed(entropies[own], places),
                )
            )
    return found


def _placed(values: Floats, places: Index) -> Floats:
    """Return an array with ``values`` at ``places``, and NaN elsewhere."""
    placed = np.full(int(places.max()) + 1, np.nan, np.float32)
    placed[places] = values
    return placed


def merged_scores(parts: Iterable[SpanScores]) -> dict[ReplyId, SpanScores]:
    """Return one record for each reply.

    Several branches of a session may each have trained some of a reply's tokens.
    """
    found: dict[ReplyId, SpanScores] = {}
    for part in parts:
        key = ReplyId(part.call_id, part.choice)
        found[key] = part if key not in found else _merged(found[key], part)
    return found


def _merged(one: SpanScores, other: SpanScores) -> SpanScores:
    return SpanScores(
        one.call_id,
        one.choice,
        one.version,
        _filled(one.logprobs, other.logprobs),
        _filled(one.entropies, other.entropies),
    )


def _filled(one: Floats, other: Floats) -> Floats:
    long, short = (one, other) if len(one) >= len(other) else (other, one)
    whole = long.copy()
    head = whole[: len(short)]
    head[np.isnan(head)] = short[np.isnan(head)]
    return whole
