"""Does the store hold together, and does every sampled token go somewhere?

The audit recounts what the writer and the builders claim, from other sides: calls against spans,
spans against their checksums, samples against spans. It reports every violation it finds and never
stops at the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridle.reconstruct.kinds.kinds import with_kinds
from bridle.reconstruct.samples.builders import Allowance, build, version_ranges
from bridle.reconstruct.samples.policy import DEFAULT_POLICY, TrainablePolicy
from bridle.reconstruct.samples.sample import Conservation, Sample
from bridle.reconstruct.session import BrokenTree, SessionTree
from bridle.store.errors import NotFound
from bridle.store.reading.queries import CallRow, Reader, SpanRow
from bridle.store.records import CallStatus, Span, SpanKind
from bridle.store.tree import DETACHED
from bridle.store.writing.integrity import span_checksum


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that is not as it must be."""

    session_id: str
    rule: str
    """Stable snake_case word."""
    subject: str
    """The call, span or sample."""
    detail: str


@dataclass(frozen=True, slots=True)
class SessionAudit:
    """One session's table and violations."""

    session_id: str
    conservation: Conservation
    calls: Mapping[CallStatus, int]
    samples: int
    violations: tuple[Violation, ...]

    @property
    def clean(self) -> bool:
        return not self.violations and self.conservation.balanced


def audit(
    reader: Reader,
    policy: TrainablePolicy = DEFAULT_POLICY,
    builder: str = "tree",
    *,
    bodies: bool = False,
    **filters: Any,
) -> Iterator[SessionAudit]:
    """Audits all sessions that match ``filters`` (those of ``Reader.sessions``), one at a time."""
    for session in reader.sessions(**filters):
        yield audit_session(reader, session.id, policy, builder, bodies=bodies)


def audit_session(
    reader: Reader,
    session_id: str,
    policy: TrainablePolicy = DEFAULT_POLICY,
    builder: str = "tree",
    *,
    bodies: bool = False,
) -> SessionAudit:
    """Checks one session. With ``bodies`` every recorded body is read and proved as well."""
    found = Findings(session_id)
    try:
        calls, rows = reader.recorded(session_id)
    except ValueError as error:
        found.add("span_damaged", session_id, str(error))
        calls, rows = reader.calls(session_id), []
    else:
        check_spans(rows, calls, found)
        check_calls(calls, rows, found)
    try:
        calls = with_kinds(calls)
    except (NotFound, ValueError) as error:
        found.add("texts_damaged", session_id, str(error))
    if bodies:
        _check_bodies(reader, calls, found)
    captured = sum(call.sampled_tokens or 0 for call in calls)
    samples: Sequence[Sample] = ()
    table = Conservation(captured, 0, {}, {"tree_broken": captured} if captured else {})
    try:
        tree = SessionTree(session_id, calls, rows)
    except BrokenTree as error:
        found.add("tree_broken", session_id, str(error))
    else:
        built = build(tree, policy, builder)
        samples, table = built.samples, built.conservation
        if table.captured != captured:
            found.add("captured_differs", session_id, f"{table.captured} sampled, {captured} said")
        check_versions(tree, found)
        check_samples(tree, policy, samples, found)
    if not table.balanced:
        found.add("not_conserved", session_id, f"{table}")
    counts = Counter(call.status for call in calls)
    return SessionAudit(session_id, table, dict(counts), len(samples), tuple(found.violations))


class Findings:
    """What the checks of one session have found so far."""

    def __init__(self, session_id: str) -> None:
        self.violations: list[Violation] = []
        self._session_id = session_id

    def add(self, rule: str, subject: str, detail: str) -> None:
        self.violations.append(Violation(self._session_id, rule, subject, detail))


def check_spans(rows: Sequence[SpanRow], calls: Sequence[CallRow], found: Findings) -> None:
    """Each span for itself: its lengths, its checksum, its versions, its call."""
    known = {call.id for call in calls}
    for row in rows:
        span = row.span
        if span.call_id not in known:
            found.add("span_without_call", span.id, f"call {span.call_id} is not recorded")
        if row.length != len(span.token_ids):
            found.add("length_differs", span.id, f"{len(span.token_ids)} ids, {row.length} said")
        if row.checksum != span_checksum(span):
            found.add("checksum_differs", span.id, "the span is not what was written")


def check_calls(calls: Sequence[CallRow], rows: Sequence[SpanRow], found: Findings) -> None:
    """Each call against its spans: their number, their place, their tokens, its usage."""
    spans_of: dict[str, list[SpanRow]] = {}
    for row in rows:
        spans_of.setdefault(row.span.call_id, []).append(row)
    for call in calls:
        own = spans_of.get(call.id, [])
        sampled = [row for row in own if row.span.kind is SpanKind.SAMPLED]
        count = sum(len(row.span.token_ids) for row in sampled)
        if count != (call.sampled_tokens or 0):
            found.add("sampled_differs", call.id, f"{count} in spans, {call.sampled_tokens} said")
        if sorted(row.choice or 0 for row in sampled) != list(range(len(sampled))):
            found.add("choices_differ", call.id, "its choices are not numbered from 0 on")
        start = DETACHED if call.prompt_tokens is None else call.prompt_tokens
        for row in own:
            span = row.span
            edge = span.start if span.kind is SpanKind.SAMPLED else span.end
            if edge != start:
                found.add("span_misplaced", span.id, f"at {edge}, the prompt ends at {start}")
            if span.kind is SpanKind.SAMPLED and span.parent_id != call.prompt_span_id:
                found.add("span_misplaced", span.id, f"hangs on {span.parent_id}")
        if call.status is CallStatus.COMPLETE:
            _check_complete(call, sampled, found)


def _check_complete(call: CallRow, sampled: Sequence[SpanRow], found: Findings) -> None:
    """What a call that is not quarantined promises."""
    if call.prompt_tokens is None and not call.sampled_tokens:
        return
    for name, recorded in (
        ("prompt_tokens", call.prompt_tokens),
        ("completion_tokens", call.sampled_tokens),
    ):
        if call.usage.get(name) != recorded:
            found.add(
                "usage_differs", call.id, f"{name}: {recorded} ids, usage {call.usage.get(name)}"
            )
    for row in sampled:
        span = row.span
        scored = -1 if span.logprobs is None else len(span.logprobs)
        if scored != len(span.token_ids):
            found.add("logprobs_differ", span.id, f"{len(span.token_ids)} ids, {scored} logprobs")
        elif scored and not np.isfinite(span.logprobs if span.logprobs is not None else []).all():
            found.add("logprobs_not_finite", span.id, "a sampled token has no logprob")
        if len(span.token_ids) and (not span.versions or span.versions[0].start != 0):
            found.add("version_missing", span.id, "a sampled token has no policy version")


def check_versions(tree: SessionTree, found: Findings) -> None:
    """Along every branch the policy only grows older to newer."""
    above: dict[str, int] = {}
    for row in tree.rows.values():
        span = row.span
        before = -1
        if span.parent_id is not None:
            parent = tree.rows[span.parent_id].span
            before = max(above[parent.id], _last_version(parent, span.start - parent.start))
        above[span.id] = last = before
        for run in span.versions:
            if run.version < last:
                found.add("version_went_back", span.id, f"from {last} to {run.version}")
            last = max(last, run.version)


def _last_version(span: Span, take: int) -> int:
    return max((run.version for run in span.versions if run.start < take), default=-1)


def check_samples(
    tree: SessionTree, policy: TrainablePolicy, samples: Sequence[Sample], found: Findings
) -> None:
    """Samples against the spans they claim to show: each allowed token is trained exactly once."""
    allowed = Allowance(tree, policy)
    trained = {
        row.span.id: np.zeros(len(row.span.token_ids), dtype=np.int32) for row in tree.sampled()
    }
    by_call: dict[str, list[Span]] = {}
    for row in tree.sampled():
        by_call.setdefault(row.span.call_id, []).append(row.span)
    for number, sample in enumerate(samples):
        subject = f"sample {number} ({sample.leaf_call_id})"
        if (sample.mask & (sample.calls < 0)).any():
            found.add("mask_on_observed", subject, "trains a token that nobody sampled")
        last: Span | None = None
        for index, start, end in _stretches(sample.calls):
            call_id = sample.call_ids[index]
            last = _shown(sample, start, end, by_call.get(call_id, ()), trained)
            if last is None:
                found.add("sample_differs", subject, f"shows other tokens than call {call_id}")
            else:
                trained[last.id][: end - start] += sample.mask[start:end]
        if last is not None and not np.array_equal(tree.ids(last), sample.token_ids):
            found.add("sample_differs", subject, f"is not the path of span {last.id}")
    for span_id, times in trained.items():
        wanted = allowed.tokens(tree.rows[span_id].span).astype(np.int32)
        for rule, count in (
            ("trained_twice", int(np.count_nonzero(times > 1))),
            ("trained_against_policy", int(np.count_nonzero((times > 0) & (wanted == 0)))),
            ("not_delivered", int(np.count_nonzero((times == 0) & (wanted > 0)))),
        ):
            if count and tree.rows[span_id].span.start != DETACHED:
                found.add(rule, span_id, f"{count} tokens")
    weight = sum(sample.weight for sample in samples)
    if samples and abs(weight - 1.0) > 1e-9:
        found.add("weights_differ", tree.session_id, f"its samples weigh {weight}, not 1")


def _stretches(calls: NDArray[np.int32]) -> Iterator[tuple[int, int, int]]:
    """``(index, start, end)`` of each run of equal values that are not -1."""
    borders = [0, *(np.flatnonzero(np.diff(calls)) + 1).tolist(), len(calls)]
    for start, end in pairwise(borders):
        if start < end and calls[start] >= 0:
            yield int(calls[start]), start, end


def _shown(
    sample: Sample,
    start: int,
    end: int,
    spans: Sequence[Span],
    trained: Mapping[str, NDArray[np.int32]],
) -> Span | None:
    """The choice that ``[start, end)`` of the sample shows; among equals one not yet trained."""
    length, mask = end - start, sample.mask[start:end]
    alike = [
        span
        for span in spans
        if span.start == start
        and len(span.token_ids) >= length
        and np.array_equal(span.token_ids[:length], sample.token_ids[start:end])
        and _same_scores(span, sample, start, length)
    ]
    fresh = [span for span in alike if not trained[span.id][:length][mask].any()]
    return next(iter(fresh or alike), None)


def _same_scores(span: Span, sample: Sample, start: int, length: int) -> bool:
    if span.logprobs is not None and len(span.logprobs) == len(span.token_ids):
        shown = np.ascontiguousarray(sample.logprobs[start : start + length])
        if shown.tobytes() != np.ascontiguousarray(span.logprobs[:length]).tobytes():
            return False
    for low, high, run in version_ranges(span):
        part = sample.versions[start + low : start + min(high, length)]
        if not (part == run.version).all():
            return False
    return True


def _check_bodies(reader: Reader, calls: Sequence[CallRow], found: Findings) -> None:
    for call in calls:
        for digest, read in (
            (call.request_sha256, reader.request_body),
            (call.response_sha256, reader.response_body),
        ):
            if digest is None:
                continue
            try:
                read(call.id)
            except (NotFound, ValueError) as error:
                found.add("body_damaged", call.id, str(error))
