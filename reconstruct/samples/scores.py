"""The trainer's scores of samples' tokens, as the last step that trained each of them left them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from bridle.reconstruct.samples.sample import Sample
from bridle.store.reading.accounts import trained_spans
from bridle.store.reading.conversation import ReplyId
from bridle.store.reading.queries import Reader
from bridle.store.trained import TrainedSpan


def with_scores(reader: Reader, samples: Iterable[Sample]) -> tuple[Sample, ...]:
    """Return the samples with the scores of their tokens.

    Raise :class:`bridle.store.reading.damage.DamagedRows` if a score cannot be read.
    """
    given = tuple(samples)
    spans = trained_spans(reader, (call_id for sample in given for call_id in sample.call_ids))
    return tuple(_scored(sample, spans) for sample in given)


def _scored(sample: Sample, spans: Mapping[ReplyId, TrainedSpan]) -> Sample:
    columns = np.full((2, len(sample.token_ids)), np.nan, np.float32)
    for index, reply in enumerate(sample.replies):
        if (span := spans.get(reply)) is None:
            continue
        places = np.flatnonzero(sample.calls == index)
        for column, values in zip(columns, (span.logprobs, span.entropies), strict=True):
            column[places[: len(values)]] = values[: len(places)]
    if np.isnan(columns).all():
        return sample
    logprobs, entropies = columns
    return replace(sample, trained_logprobs=logprobs, entropies=entropies)
