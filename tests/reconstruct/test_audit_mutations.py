"""Random sessions, each damaged in four ways at random places: the audit misses none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from bridle.reconstruct.audit import (
    Findings,
    audit_session,
    check_calls,
    check_samples,
    check_spans,
)
from bridle.reconstruct.samples.builders import BUILDERS, build
from bridle.reconstruct.samples.rules import DEFAULT_RULES
from bridle.reconstruct.session import LoadedSession
from bridle.reconstruct.tree import BrokenTree
from bridle.store.records import CallKind, SpanKind

EXAMPLES = 25


@st.composite
def stories(draw):
    """Draw each call of a session: where it continues, its new tokens, and its samples."""
    count = draw(st.integers(1, 7))
    return [
        {
            "from": draw(st.integers(-1, turn - 1)),
            "cut": draw(st.integers(0, 3)),
            "adds": draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)),
            "samples": draw(
                st.lists(
                    st.lists(st.integers(50, 60), min_size=1, max_size=5), min_size=1, max_size=2
                )
            ),
            "kind": draw(st.sampled_from([CallKind.MAIN, CallKind.MAIN, CallKind.SUBAGENT])),
        }
        for turn in range(count)
    ]


def played(record, story):
    """Records a story; gives the session."""
    session, paths, ids = record(), [], []
    for turn in story:
        before = paths[turn["from"]] if turn["from"] >= 0 else []
        before = before[: len(before) - min(turn["cut"], len(before))]
        prompt = [*before, *turn["adds"]]
        parent = ids[turn["from"]] if turn["from"] >= 0 else None
        ids.append(session.call(prompt, *turn["samples"], parent=parent, kind=turn["kind"]))
        paths.append([*prompt, *turn["samples"][0]])
    return session


def caught(loaded, calls, spans):
    """Return whether the audit objects to these calls and spans."""
    damaged = replace(loaded, calls=calls, spans=spans)
    found = Findings(damaged.id)
    check_spans(damaged, found)
    check_calls(damaged, found)
    for builder in BUILDERS:
        try:
            built = build(damaged, DEFAULT_RULES, builder)
        except BrokenTree:
            return True
        check_samples(damaged, DEFAULT_RULES, built.samples, found)
        if not built.conservation.balanced:
            return True
    return bool(found.violations)


def objections(loaded, samples):
    found = Findings(loaded.id)
    check_samples(loaded, DEFAULT_RULES, samples, found)
    return found.violations


many = settings(
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture
def recounted(record, reader):
    """``recounted(story)``: a clean session, loaded."""

    def play(story):
        session = played(record, story)
        assert audit_session(reader, session.id, bodies=True).clean
        return LoadedSession.load(reader, session.id)

    return play


@many
@given(story=stories())
def test_every_dropped_span_is_caught(recounted, story):
    loaded = recounted(story)
    calls, rows = loaded.calls, loaded.spans
    for row in rows:
        assert caught(loaded, calls, [other for other in rows if other is not row])


@many
@given(story=stories())
def test_every_duplicated_call_is_caught(recounted, story):
    loaded = recounted(story)
    calls, rows = loaded.calls, loaded.spans
    for call in calls:
        copy = replace(call, id=f"{call.id}x")
        assert caught(loaded, [*calls, copy], rows)
        own = [row for row in rows if row.span.call_id == call.id]
        spans = [
            replace(row, span=structs.replace(row.span, id=f"{row.span.id}x", call_id=copy.id))
            for row in own
        ]
        assert caught(loaded, [*calls, copy], [*rows, *spans])


@many
@given(story=stories())
def test_every_mask_shifted_by_one_is_caught(recounted, story):
    loaded = recounted(story)
    for builder in BUILDERS:
        samples = list(build(loaded, DEFAULT_RULES, builder).samples)
        assert not objections(loaded, samples)
        for number, sample in enumerate(samples):
            for by in (1, -1):
                mask = np.roll(sample.mask, by)
                changed = [*samples]
                changed[number] = replace(sample, mask=mask)
                if not np.array_equal(mask, sample.mask):
                    assert objections(loaded, changed), (builder, number, by)


@many
@given(story=stories(), data=st.data())
def test_every_two_swapped_logprobs_are_caught(recounted, story, data):
    loaded = recounted(story)
    calls, rows = loaded.calls, loaded.spans
    for index, row in enumerate(rows):
        if row.span.kind is not SpanKind.SAMPLED or len(row.span.token_ids) < 2:
            continue
        one, other = data.draw(
            st.tuples(*[st.integers(0, len(row.span.token_ids) - 1)] * 2).filter(
                lambda pair: pair[0] != pair[1]
            )
        )
        swapped = row.span.logprobs.copy()
        swapped[[one, other]] = swapped[[other, one]]
        if swapped.tobytes() == row.span.logprobs.tobytes():
            continue
        damaged = [*rows]
        damaged[index] = replace(row, span=structs.replace(row.span, logprobs=swapped))
        assert caught(loaded, calls, damaged)
    samples = list(build(loaded, DEFAULT_RULES).samples)
    for number, sample in enumerate(samples):
        places = np.flatnonzero(sample.calls >= 0)
        if len(places) < 2:
            continue
        swapped = sample.logprobs.copy()
        swapped[places[[0, -1]]] = swapped[places[[-1, 0]]]
        if swapped.tobytes() != sample.logprobs.tobytes():
            changed = [*samples]
            changed[number] = replace(sample, logprobs=swapped)
            assert objections(loaded, changed)
