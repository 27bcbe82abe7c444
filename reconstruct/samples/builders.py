"""From branches to samples. Three builders, one assembly, one account of every sampled token.

``tree`` (the default)
    Each branch is a sample. A sampled token that several branches share is trained in the first of
    them (in the order in which their last calls began) and is context in the others.
``merged``
    Each chain of calls that continue one another token by token is a sample: what trainers do that
    merge a rollout's turns by prefix. A second continuation of the same call starts a new sample.
``per_call``
    Each call is a sample: what trainers do that do not merge at all.

A branch on which the policy allows nothing to be trained makes no sample. The weight of a sample is
its share of the session's trained tokens, so that a session weighs 1 and its tokens weigh the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bridle.reconstruct.samples.policy import TrainablePolicy, untrainable, version_reason
from bridle.reconstruct.samples.sample import Conservation, Sample
from bridle.reconstruct.session import Branch, Piece, SessionTree
from bridle.store.reading.queries import CallRow, SpanRow
from bridle.store.records import Span, SpanKind, VersionRun
from bridle.store.tree import DETACHED

BUILDER_VERSION: Final = 2
"""Changes when the same session and policy would give other samples."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one sample trains of one span: the tokens from ``start`` on, as far as it reaches."""

    span_id: str
    start: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A sample to be: a branch, and the spans that it trains rather than shows."""

    branch: Branch
    shares: tuple[Share, ...]


Builder = Callable[[SessionTree], list[Plan]]


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a branch, and what the sample trains of it."""

    piece: Piece
    trains: tuple[tuple[int, int], ...] = ()
    """``[start, end)`` within the span."""


@dataclass(frozen=True, slots=True)
class Built:
    """A session's samples, and where its sampled tokens went."""

    samples: tuple[Sample, ...]
    conservation: Conservation
    segments: tuple[tuple[Segment, ...], ...]
    """What each sample is made of."""


def build(tree: SessionTree, policy: TrainablePolicy, builder: str = "tree") -> Built:
    """The session's samples under a policy. Raises ``KeyError`` for an unknown builder."""
    allowed = Allowance(tree, policy)
    kept: list[tuple[Segment, ...]] = []
    shown: dict[str, int] = {}
    trained: dict[str, int] = {}
    leaves: list[CallRow] = []
    for plan in BUILDERS[builder](tree):
        shares = {share.span_id: share.start for share in plan.shares}
        segments = [
            Segment(piece, allowed.ranges(piece.span.id, shares[piece.span.id], piece.take))
            if piece.span.id in shares
            else Segment(piece)
            for piece in plan.branch.pieces
        ]
        if not any(segment.trains for segment in segments):
            continue
        kept.append(tuple(segments))
        leaves.append(plan.branch.leaf)
        for segment in segments:
            span = segment.piece.span
            if span.kind is SpanKind.SAMPLED:
                shown[span.id] = max(shown.get(span.id, 0), segment.piece.take)
                trained[span.id] = trained.get(span.id, 0) + _count(segment)
    total = sum(trained.values())
    samples = tuple(
        assemble(leaf, segments, sum(map(_count, segments)) / total)
        for leaf, segments in zip(leaves, kept, strict=True)
    )
    return Built(samples, _account(tree, allowed, shown, trained), tuple(kept))


def _count(segment: Segment) -> int:
    return sum(end - start for start, end in segment.trains)


class Allowance:
    """What the policy says of every sampled span of a session."""

    def __init__(self, tree: SessionTree, policy: TrainablePolicy) -> None:
        self._refused: dict[str, list[tuple[int, int, str]]] = {}
        """By span: ``(start, end, reason)`` of what may not be trained."""
        by_version = policy.oldest_version is not None or bool(policy.untrusted_versions)
        for row in tree.sampled():
            span = row.span
            call = tree.calls.get(span.call_id)
            reason = "call_missing" if call is None else untrainable(policy, call, row)
            if reason is not None:
                self._refused[span.id] = [(0, len(span.token_ids), reason)]
                continue
            self._refused[span.id] = [
                (start, end, found)
                for start, end, run in (version_ranges(span) if by_version else ())
                if (found := version_reason(policy, run)) is not None
            ]

    def tokens(self, span: Span) -> NDArray[np.bool_]:
        """``bool[T]``: which tokens of a sampled span may be trained."""
        allowed = np.ones(len(span.token_ids), dtype=np.bool_)
        for start, end, _ in self._refused[span.id]:
            allowed[start:end] = False
        return allowed

    def ranges(self, span_id: str, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """What of ``[start, end)`` may be trained, as ranges within the span."""
        found: list[tuple[int, int]] = []
        at = start
        for low, high, _ in self._refused[span_id]:
            if at < min(low, end):
                found.append((at, min(low, end)))
            at = max(at, high)
        if at < end:
            found.append((at, end))
        return tuple(found)

    def refused(self, span_id: str, start: int, end: int) -> Iterator[tuple[str, int]]:
        """Tokens of ``[start, end)`` that may not be trained: reasons and how many."""
        for low, high, why in self._refused[span_id]:
            overlap = min(end, high) - max(start, low)
            if overlap > 0:
                yield why, overlap


def plan_tree(tree: SessionTree) -> list[Plan]:
    """Every branch; a shared sampled token belongs to the first branch that reaches it."""
    reached: dict[str, int] = {}
    plans: list[Plan] = []
    for branch in tree.branches():
        shares: list[Share] = []
        for piece in branch.pieces:
            before = reached.get(piece.span.id, 0)
            if piece.span.kind is SpanKind.SAMPLED and piece.take > before:
                shares.append(Share(piece.span.id, before))
                reached[piece.span.id] = piece.take
        plans.append(Plan(branch, tuple(shares)))
    return plans


def plan_merged(tree: SessionTree) -> list[Plan]:
    """One sample per unbroken chain of calls."""
    chains: dict[str, tuple[SpanRow, list[Share]]] = {}
    for row in _attached(tree):
        above = _continues(tree, row)
        _, shares = chains.pop(above, (row, [])) if above is not None else (row, [])
        chains[row.span.id] = (row, [*shares, Share(row.span.id)])
    return [Plan(tree.branch(row), tuple(shares)) for row, shares in chains.values()]


def plan_per_call(tree: SessionTree) -> list[Plan]:
    """One sample per sampled span."""
    return [Plan(tree.branch(row), (Share(row.span.id),)) for row in _attached(tree)]


BUILDERS: Final[Mapping[str, Builder]] = {
    "tree": plan_tree,
    "merged": plan_merged,
    "per_call": plan_per_call,
}


def assemble(leaf: CallRow, segments: Sequence[Segment], weight: float) -> Sample:
    """Lays a branch's spans end to end; ``leaf`` is the call that sampled its last piece."""
    last = segments[-1].piece
    length = last.span.start + last.take
    token_ids = np.empty(length, dtype=np.uint32)
    mask = np.zeros(length, dtype=np.bool_)
    logprobs = np.zeros(length, dtype=np.float32)
    versions = np.full(length, -1, dtype=np.int64)
    calls = np.full(length, -1, dtype=np.int32)
    call_ids: dict[str, int] = {}
    for segment in segments:
        span, take = segment.piece.span, segment.piece.take
        at = slice(span.start, span.start + take)
        token_ids[at] = span.token_ids[:take]
        if span.kind is not SpanKind.SAMPLED:
            continue
        calls[at] = call_ids.setdefault(span.call_id, len(call_ids))
        scores = _scores(span)[:take]
        logprobs[span.start : span.start + len(scores)] = scores
        for start, end, run in version_ranges(span):
            versions[span.start + start : span.start + min(end, take)] = run.version
        for start, end in segment.trains:
            mask[span.start + start : span.start + end] = True
    return Sample(
        session_id=leaf.session_id,
        leaf_call_id=leaf.id,
        kind=leaf.kind,
        role=leaf.role,
        token_ids=token_ids,
        mask=mask,
        logprobs=logprobs,
        versions=versions,
        calls=calls,
        call_ids=tuple(call_ids),
        weight=weight,
    )


def _account(
    tree: SessionTree, allowed: Allowance, shown: Mapping[str, int], trained: Mapping[str, int]
) -> Conservation:
    """Where every sampled token of the session went.

    Tokens that the policy allows are trained by every builder, so those missing here are counted
    as ``not_delivered``: the audit fails on it.
    """
    captured = 0
    masked: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for row in tree.sampled():
        span_id, length = row.span.id, len(row.span.token_ids)
        seen, missing = shown.get(span_id, 0), length - trained.get(span_id, 0)
        captured += length
        for counts, start, end in ((masked, 0, seen), (dropped, seen, length)):
            for reason, tokens in allowed.refused(span_id, start, end):
                counts[reason] += tokens
                missing -= tokens
        if missing:
            dropped["not_delivered"] += missing
    return Conservation(captured, sum(trained.values()), dict(masked), dict(dropped))


def add_up(tables: Iterable[Conservation]) -> Conservation:
    """The sum of sessions' tables."""
    captured = trained = 0
    masked: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for table in tables:
        captured += table.captured
        trained += table.trained
        masked.update(table.masked)
        dropped.update(table.dropped)
    return Conservation(captured, trained, dict(masked), dict(dropped))


def version_ranges(span: Span) -> list[tuple[int, int, VersionRun]]:
    """``(start, end, run)`` for each policy version that sampled in this span."""
    if len(span.versions) == 1:
        (only,) = span.versions
        return [(only.start, len(span.token_ids), only)]
    ends = [run.start for run in span.versions[1:]] + [len(span.token_ids)]
    return [(run.start, end, run) for run, end in zip(span.versions, ends, strict=True)]


def _attached(tree: SessionTree) -> list[SpanRow]:
    found = (row for row in tree.sampled() if row.span.start != DETACHED)
    return [row for row in found if row.span.call_id in tree.calls]


def _continues(tree: SessionTree, row: SpanRow) -> str | None:
    """The sampled span nearest above, when all of it is on this span's path."""
    pieces: Sequence[Piece] = tree.path(row.span.parent_id, row.span.start)
    for piece in reversed(pieces):
        if piece.span.kind is SpanKind.SAMPLED:
            return piece.span.id if piece.take == len(piece.span.token_ids) else None
    return None


def _scores(span: Span) -> NDArray[np.float32]:
    return np.empty(0, dtype=np.float32) if span.logprobs is None else span.logprobs
