"""From branches to samples: three builders, one assembly, one account of every sampled token.

``tree`` (the default)
    Each branch is a sample. A sampled token that several branches share is trained in the first of
    them (in the order in which their last calls began) and is context in the others.
``merged``
    Each chain of calls that continue one another token by token is a sample: what trainers do that
    merge a rollout's turns by prefix. A second continuation of the same call starts a new sample.
``per_call``
    Each call is a sample: what trainers do that do not merge at all.

A branch on which the rules allow nothing to be trained makes no sample. The weight of a sample is
its share of the session's trained tokens, so that a session weighs 1 and its tokens weigh the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bridle.reconstruct.conversation import ReplyId
from bridle.reconstruct.samples.rules import Ruling, SampleRules, rulings
from bridle.reconstruct.samples.sample import Conservation, Sample
from bridle.reconstruct.session import LoadedSession
from bridle.reconstruct.tree import Branch, Piece, SessionTree, version_ranges
from bridle.store.reading.queries import CallRow, SpanRow
from bridle.store.records import Span, SpanKind
from bridle.store.tree import DETACHED

BUILDER_VERSION: Final = 2
"""Changes when the same session and rules would give other samples."""


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """A sample to be: a branch, and where in its spans the sample begins to train."""

    branch: Branch
    trains_from: Mapping[str, int]
    """By span: tokens from here on are this sample's, as far as its branch reaches; an earlier
    sample, or none, trains the others."""


Builder = Callable[[SessionTree], list[SamplePlan]]


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a branch, and which of its tokens the sample trains."""

    piece: Piece
    trains: tuple[tuple[int, int], ...] = ()
    """``[start, end)`` within the span."""


@dataclass(frozen=True, slots=True)
class Built:
    """A session's samples, and where its sampled tokens went."""

    samples: tuple[Sample, ...]
    conservation: Conservation
    segments: tuple[tuple[Segment, ...], ...]
    """Of each sample."""


def build(session: LoadedSession, rules: SampleRules, builder: str = "tree") -> Built:
    """The session's samples under the rules.

    Raises :class:`bridle.reconstruct.tree.BrokenTree`, and ``KeyError`` for an unknown builder.
    """
    tree, decided = session.tree, rulings(session, rules)
    kept: list[tuple[Segment, ...]] = []
    shown: dict[str, int] = {}
    trained: dict[str, int] = {}
    leaves: list[CallRow] = []
    for plan in BUILDERS[builder](tree):
        segments = [_segment(piece, plan, decided) for piece in plan.branch.pieces]
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
    return Built(samples, _account(tree, decided, shown, trained), tuple(kept))


def not_built(session: LoadedSession) -> Conservation:
    """The account of a session whose tree is broken: all of its tokens are dropped."""
    captured = session.captured
    return Conservation(captured, 0, dropped={"tree_broken": captured} if captured else {})


def _segment(piece: Piece, plan: SamplePlan, decided: Mapping[ReplyId, Ruling]) -> Segment:
    start = plan.trains_from.get(piece.span.id)
    if start is None:
        return Segment(piece)
    ruling = _ruling(decided, piece.row)
    return Segment(piece, ruling.ranges(start, piece.take))


def _count(segment: Segment) -> int:
    return sum(end - start for start, end in segment.trains)


def _ruling(decided: Mapping[ReplyId, Ruling], row: SpanRow) -> Ruling:
    ruling = decided.get(ReplyId(row.span.call_id, row.choice or 0))
    if ruling is None:
        tokens = len(row.span.token_ids)
        return Ruling(tokens, ((0, tokens, "call_missing"),))
    return ruling


def plan_tree(tree: SessionTree) -> list[SamplePlan]:
    """Every branch; a shared sampled token belongs to the first branch that reaches it."""
    reached: dict[str, int] = {}
    plans: list[SamplePlan] = []
    for branch in tree.branches():
        starts: dict[str, int] = {}
        for piece in branch.pieces:
            before = reached.get(piece.span.id, 0)
            if piece.span.kind is SpanKind.SAMPLED and piece.take > before:
                starts[piece.span.id] = before
                reached[piece.span.id] = piece.take
        plans.append(SamplePlan(branch, starts))
    return plans


def plan_merged(tree: SessionTree) -> list[SamplePlan]:
    """One sample per unbroken chain of calls."""
    chains: dict[str, tuple[SpanRow, dict[str, int]]] = {}
    for row in _attached(tree):
        above = _continues(tree, row)
        _, starts = chains.pop(above, (row, {})) if above is not None else (row, {})
        starts[row.span.id] = 0
        chains[row.span.id] = (row, starts)
    return [SamplePlan(tree.branch(row), starts) for row, starts in chains.values()]


def plan_per_call(tree: SessionTree) -> list[SamplePlan]:
    """One sample per sampled span."""
    return [SamplePlan(tree.branch(row), {row.span.id: 0}) for row in _attached(tree)]


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
    tree: SessionTree,
    decided: Mapping[ReplyId, Ruling],
    shown: Mapping[str, int],
    trained: Mapping[str, int],
) -> Conservation:
    """Where every sampled token of the session went.

    Every builder trains all tokens that the rules allow, so those missing here are counted as
    ``not_delivered``: the audit fails on it.
    """
    captured = 0
    masked: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for row in tree.sampled():
        span_id, length = row.span.id, len(row.span.token_ids)
        ruling = _ruling(decided, row)
        seen, missing = shown.get(span_id, 0), length - trained.get(span_id, 0)
        captured += length
        parts = () if ruling.whole else ((masked, 0, seen), (dropped, seen, length))
        for counts, start, end in parts:
            excluded = ruling.reasons(start, end)
            counts.update(excluded)
            missing -= excluded.total()
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


def _attached(tree: SessionTree) -> list[SpanRow]:
    found = (row for row in tree.sampled() if row.span.start != DETACHED)
    return [row for row in found if row.span.call_id in tree.calls]


def _continues(tree: SessionTree, row: SpanRow) -> str | None:
    """The sampled span nearest above, when all of it is on this span's path."""
    end, link = row.span.start, row.span.parent_id
    while link is not None:
        above = tree.rows[link].span
        if above.start < end:
            if above.kind is SpanKind.SAMPLED:
                return above.id if above.end <= end else None
            end = above.start
        link = above.parent_id
    return None


def _scores(span: Span) -> NDArray[np.float32]:
    return np.empty(0, dtype=np.float32) if span.logprobs is None else span.logprobs
