"""Check that the store is consistent and that every sampled token is accounted for.

The audit recounts independently what the writer and the builders recorded: calls against spans,
spans against their checksums, and samples against spans. It reports every violation and never stops
at the first one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.exc import DBAPIError

from bridle.reconstruct.accounts import StatedRules, session_fates
from bridle.reconstruct.kinds.roots import unlinked_roots
from bridle.reconstruct.samples.builders import BUILDER_VERSION, build, not_built
from bridle.reconstruct.samples.rules import SampleRules, rulings
from bridle.reconstruct.samples.sample import Conservation, Sample, sample_logprobs
from bridle.reconstruct.session import LoadedSession
from bridle.reconstruct.tree import BrokenTree, SessionTree, SpanPiece, version_ranges
from bridle.reconstruct.verdicts import store_judgement
from bridle.store.errors import NotFound, StoreUnavailable
from bridle.store.reading.accounts import (
    NO_ACCOUNT,
    WrittenAccount,
    training_accounts,
    written_accounts,
)
from bridle.store.reading.conversation import ReplyId
from bridle.store.reading.queries import CallRow, Reader, SpanRow
from bridle.store.reading.session_filter import SessionFilter
from bridle.store.records import CallStatus, Span, SpanKind
from bridle.store.schema.accounts import TRAINED, Fate
from bridle.store.trained import SessionFates
from bridle.store.tree import DETACHED
from bridle.store.writing.integrity import span_checksum

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Violation:
    session_id: str
    rule: str
    """A stable snake_case word."""
    subject: str
    """The call, span, sample, run or session that contradicts the record."""
    detail: str


@dataclass(frozen=True, slots=True)
class SamplerTokens:
    """Token counts of one sampler."""

    captured: int = 0
    trainable: int = 0
    """Tokens that the rules allow to train, whether or not they were trained."""

    def __add__(self, other: SamplerTokens) -> SamplerTokens:
        return SamplerTokens(self.captured + other.captured, self.trainable + other.trainable)


@dataclass(frozen=True, slots=True)
class SessionAudit:
    """One session's token account and violations."""

    session_id: str
    fates: Mapping[Fate, int]
    """The fates of its sampled tokens (:mod:`bridle.reconstruct.accounts`)."""
    conservation: Conservation
    """The account that the rules give, counted from the spans."""
    calls: Mapping[CallStatus, int]
    samples: int
    samplers: Mapping[str, SamplerTokens]
    """Sampled tokens by the sampler's label (:attr:`bridle.store.records.Sampler.label`)."""
    violations: tuple[Violation, ...]
    unlinked_roots: int = 0
    """Number of calls that continue none and whose kind does not explain it
    (:func:`bridle.reconstruct.kinds.roots.unlinked_roots`)."""
    judged: bool = False
    """True if the audit has stored verdicts or an account that the store did not have."""

    @property
    def clean(self) -> bool:
        return not self.violations and self.conservation.balanced


def audit(
    reader: Reader,
    rules: SampleRules | None = None,
    builder: str = "tree",
    *,
    bodies: bool = False,
    **conditions: Any,
) -> Iterator[SessionAudit]:
    """Audit the sessions that match, one at a time, and store the judgement that they lack.

    ``conditions`` are those of ``Reader.sessions``. With ``run``, all sessions that belong to the
    account of the run are audited. ``rules`` judge the tokens that no training has taken. If it is
    ``None``, the rules of the session's run apply (:class:`StatedRules`), and the verdicts and the
    account that they give are stored.
    """
    accounts = written_accounts(reader, SessionFilter(**conditions))
    for session in LoadedSession.stream(reader, reader.sessions(account=True, **conditions)):
        audited = audit_loaded(session, rules, builder, bodies=bodies, accounts=accounts)
        if rules is None and builder == "tree" and not session.damage:
            written = accounts.get(session.id, NO_ACCOUNT)
            account = None if written.is_final else audited.fates
            audited = replace(audited, judged=_store(session, account))
        yield audited


def _store(session: LoadedSession, account: Mapping[Fate, int] | None) -> bool:
    """Store the judgement of a session, unless the store cannot be written."""
    try:
        return store_judgement(session, account)
    except (StoreUnavailable, DBAPIError) as error:
        log.warning("judgement_not_stored: session %s: %s", session.id, error)
        return False


def audit_session(
    reader: Reader,
    session_id: str,
    rules: SampleRules | None = None,
    builder: str = "tree",
    *,
    bodies: bool = False,
) -> SessionAudit:
    """Audit one session by its id, as :func:`audit` does.

    Raise :class:`bridle.store.errors.NotFound` if there is none.
    """
    wanted = reader.session(session_id).id
    return next(audit(reader, rules, builder, bodies=bodies, session=wanted))


def audit_loaded(
    session: LoadedSession,
    rules: SampleRules | None = None,
    builder: str = "tree",
    *,
    bodies: bool = False,
    accounts: Mapping[str, WrittenAccount] | None = None,
) -> SessionAudit:
    """Audit one session.

    With ``bodies``, every recorded body is read and verified as well. ``accounts`` are those of the
    store, which are read if they are not given.
    """
    judged = rules or StatedRules(session.reader).of(session.record.run_id)
    if accounts is None:
        accounts = written_accounts(session.reader, SessionFilter(session=session.id))
    found = Findings(session.id)
    for damage in session.damage:
        found.add(damage.rule, session.id, damage.detail)
    if not any(damage.rule == "span_damaged" for damage in session.damage):
        check_spans(session, found)
        check_calls(session, found)
    if bodies:
        _check_bodies(session, found)
    samples: Sequence[Sample] = ()
    try:
        built = build(session, judged, builder)
    except BrokenTree as error:
        found.add("tree_broken", session.id, str(error))
        table = not_built(session)
    else:
        samples, table = built.samples, built.conservation
        if table.captured != session.captured:
            detail = f"{table.captured} sampled, the calls count {session.captured}"
            found.add("captured_differs", session.id, detail)
        check_versions(session.tree, found)
        check_samples(session, judged, samples, found)
    if not table.balanced:
        found.add("not_conserved", session.id, f"{table}")
    check_training(session, judged, table, found)
    fates = session_fates(accounts.get(session.id, NO_ACCOUNT), table)
    if sum(fates.values()) != table.captured:
        detail = f"{sum(fates.values())} tokens have a fate, {table.captured} were sampled"
        found.add("not_accounted", session.id, detail)
    counts = Counter(call.status for call in session.calls)
    by_sampler = _tokens_by_sampler(session, samples)
    violations = tuple(found.violations)
    return SessionAudit(
        session.id,
        fates,
        table,
        dict(counts),
        len(samples),
        by_sampler,
        violations,
        len(unlinked_roots(session.calls)),
    )


def _tokens_by_sampler(
    session: LoadedSession, samples: Sequence[Sample]
) -> dict[str, SamplerTokens]:
    trainable: Counter[str] = Counter()
    for sample in samples:
        places, counts = np.unique(sample.calls[sample.mask], return_counts=True)
        for place, count in zip(places.tolist(), counts.tolist(), strict=True):
            trainable[sample.call_ids[place]] += count
    found: dict[str, SamplerTokens] = {}
    for call in session.calls:
        if call.sampled_tokens:
            label = "not recorded" if call.sampler is None else call.sampler.label
            tokens = SamplerTokens(call.sampled_tokens, trainable[call.id])
            found[label] = found.get(label, SamplerTokens()) + tokens
    return found


class Findings:
    """The violations that the checks of one session have found so far."""

    def __init__(self, session_id: str) -> None:
        self.violations: list[Violation] = []
        self._session_id = session_id

    def add(self, rule: str, subject: str, detail: str) -> None:
        self.violations.append(Violation(self._session_id, rule, subject, detail))


def check_spans(session: LoadedSession, found: Findings) -> None:
    """Check each span by itself: its length, its checksum and its call."""
    for row in session.spans:
        span = row.span
        if span.call_id not in session.by_id:
            found.add("span_without_call", span.id, f"call {span.call_id} is not recorded")
        if row.length != len(span.token_ids):
            found.add("length_differs", span.id, f"{len(span.token_ids)} ids, not {row.length}")
        if row.checksum != span_checksum(span):
            found.add("checksum_differs", span.id, "the span is not what was written")


def check_calls(session: LoadedSession, found: Findings) -> None:
    """Check each call against its spans.

    The check covers their number, positions and tokens, and the call's usage.
    """
    spans_of: dict[str, list[SpanRow]] = {}
    for row in session.spans:
        spans_of.setdefault(row.span.call_id, []).append(row)
    for call in session.calls:
        own = spans_of.get(call.id, [])
        sampled = session.sampled.get(call.id, ())
        count = sum(len(row.span.token_ids) for row in sampled)
        if count != (call.sampled_tokens or 0):
            found.add("sampled_differs", call.id, f"{count} in spans, not {call.sampled_tokens}")
        if sorted(row.choice or 0 for row in sampled) != list(range(len(sampled))):
            found.add("choices_differ", call.id, "its choices are not numbered from 0 on")
        start = DETACHED if call.prompt_tokens is None else call.prompt_tokens
        for row in own:
            span = row.span
            edge = span.start if span.kind is SpanKind.SAMPLED else span.end
            # The reply of a replayed call ends its observed span.
            after = call.replayed_call_id is not None and edge > (start or 0)
            if edge != start and not after:
                found.add("span_misplaced", span.id, f"at {edge}, the prompt ends at {start}")
            if span.kind is SpanKind.SAMPLED and span.parent_id != call.prompt_span_id:
                found.add("span_misplaced", span.id, f"hangs on {span.parent_id}")
        if call.status is CallStatus.COMPLETE:
            _check_complete(call, sampled, found)


def _check_complete(call: CallRow, sampled: Sequence[SpanRow], found: Findings) -> None:
    """Check that usage, logprobs and versions of a complete call agree with its tokens."""
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
        elif scored and np.isinf(span.logprobs if span.logprobs is not None else []).any():
            found.add("logprobs_not_finite", span.id, "a sampled token has an infinite logprob")
        if len(span.token_ids) and (not span.versions or span.versions[0].start != 0):
            found.add("version_missing", span.id, "a sampled token has no policy version")


def check_versions(tree: SessionTree, found: Findings) -> None:
    """Check that the policy version never falls along a branch."""
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
    session: LoadedSession, rules: SampleRules, samples: Sequence[Sample], found: Findings
) -> None:
    """Check samples against the spans that they show.

    Each allowed token must be trained exactly once.
    """
    trained = {
        row.span.id: np.zeros(len(row.span.token_ids), np.int32) for row in session.tree.sampled()
    }
    for number, sample in enumerate(samples):
        subject = f"sample {number} ({sample.leaf_call_id})"
        rows = session.sampled.get(sample.leaf_call_id, ())
        leaf = next((row for row in rows if (row.choice or 0) == sample.leaf_choice), None)
        if leaf is None or leaf.span.end != len(sample.token_ids):
            found.add("sample_differs", subject, "is no path of the tree")
            continue
        for piece in session.tree.branch(leaf):
            span, at = piece.span, slice(piece.span.start, piece.span.start + piece.take)
            if not _shows(sample, piece):
                found.add("sample_differs", subject, f"shows other values than span {span.id}")
            if span.kind is SpanKind.SAMPLED:
                trained[span.id][: piece.take] += sample.mask[at]
            elif sample.mask[at].any():
                found.add("mask_on_observed", subject, "trains a token that nobody sampled")
    _check_trained(session, rules, trained, found)
    weight = sum(sample.weight for sample in samples)
    if samples and abs(weight - 1.0) > 1e-9:
        found.add("weights_differ", session.id, f"its samples weigh {weight}, not 1")


def _check_trained(
    session: LoadedSession,
    rules: SampleRules,
    trained: Mapping[str, NDArray[np.int32]],
    found: Findings,
) -> None:
    """Check how often each sampled token is trained, ``int32[T]`` by span, against the rules."""
    sampled = {row.span.id: row for row in session.tree.sampled()}
    decided = rulings(session, rules)
    for span_id, times in trained.items():
        row = sampled[span_id]
        ruling = decided.get(ReplyId(row.span.call_id, row.choice or 0))
        wanted = ruling.mask() if ruling is not None else np.zeros(len(times), np.bool_)
        for rule, count in (
            ("trained_twice", int(np.count_nonzero(times > 1))),
            ("trained_against_rules", int(np.count_nonzero((times > 0) & ~wanted))),
            ("not_delivered", int(np.count_nonzero((times == 0) & wanted))),
        ):
            if count:
                found.add(rule, span_id, f"{count} tokens")


def _shows(sample: Sample, piece: SpanPiece) -> bool:
    """Return whether a sample holds a piece's ids, logprobs, versions and call, bit for bit."""
    span, take = piece.span, piece.take
    at = slice(span.start, span.start + take)
    if not np.array_equal(sample.token_ids[at], span.token_ids[:take]):
        return False
    if span.kind is not SpanKind.SAMPLED:
        return bool((sample.calls[at] == -1).all())
    if not all(sample.call_ids[index] == span.call_id for index in np.unique(sample.calls[at])):
        return False
    if span.logprobs is not None and len(span.logprobs) == len(span.token_ids):
        shown = np.ascontiguousarray(sample.logprobs[at])
        if shown.tobytes() != np.ascontiguousarray(sample_logprobs(span.logprobs[:take])).tobytes():
            return False
    return all(
        (sample.versions[at][start : min(end, take)] == run.version).all()
        for start, end, run in version_ranges(span)
    )


def check_training(
    session: LoadedSession, rules: SampleRules, table: Conservation, found: Findings
) -> None:
    """Check the accounts that training runs have written of the session against its record.

    ``table`` is the account that ``rules`` give.

    A run accounts for every token that was sampled when it took the session, and it trains no more
    of them than its own rules allow.
    """
    for account in training_accounts(session.reader, session.id):
        subject = f"run {account.run_id}"
        if unknown := {fate for fate, _ in account.tokens} - {"trained", "masked", "dropped"}:
            found.add("fates_unknown", subject, ", ".join(sorted(unknown)))
        if any(tokens < 0 for tokens in account.tokens.values()):
            found.add("fates_differ", subject, f"a fate has a negative number: {account.tokens}")
        total = sum(account.tokens.values())
        ended = min(account.at, session.record.sealed_at or account.at)
        later = sum(
            call.sampled_tokens or 0 for call in session.calls if (call.ended_at or 0.0) > ended
        )
        if not table.captured - later <= total <= table.captured:
            detail = f"accounts for {total} tokens, and {table.captured} were sampled"
            found.add("fates_differ", subject, detail)
        allowed = _allowed(session, account, rules, table)
        trained = account.tokens.get(TRAINED, 0)
        if allowed is not None and trained > allowed:
            detail = f"trained {trained} tokens, of which its rules allow {allowed}"
            found.add("trained_against_rules", subject, detail)


def _allowed(
    session: LoadedSession, account: SessionFates, rules: SampleRules, table: Conservation
) -> int | None:
    """Return the number of tokens of the session that the run's rules allow to train.

    Return ``None`` if the run has stated no rules, or if they may have allowed others when it took
    the session.
    """
    try:
        stated = session.reader.run(account.run_id).config.get("samples")
    except NotFound:
        return None
    if not stated or stated.get("builder_version") != BUILDER_VERSION:
        return None
    own = SampleRules.from_data(stated["rules"])
    judged_since = any(call.kind_set is not None for call in session.calls)
    if judged_since or own.turn_reward is not None:
        return None
    if own == rules:
        return table.trained
    try:
        return build(session, own).conservation.trained
    except BrokenTree:
        return None


def _check_bodies(session: LoadedSession, found: Findings) -> None:
    for call in session.calls:
        for read in (session.request, session.response):
            try:
                read(call)
            except (NotFound, ValueError) as error:
                found.add("body_damaged", call.id, str(error))
