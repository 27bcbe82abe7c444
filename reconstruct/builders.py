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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reconstruct.policy import TrainablePolicy, untrainable, version_reason
from reconstruct.samples import Conservation, Sample
from reconstruct.tree import Branch, Piece, SessionTree
from store.queries import SpanRow
from store.records import Span, SpanKind, VersionRun
from store.tree import DETACHED

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
class Built:
    """A session's samples, and where its sampled tokens went."""

    samples: tuple[Sample, ...]
    conservation: Conservation


def build(tree: SessionTree, policy: TrainablePolicy, builder: str = "tree") -> Built:
    """The session's samples under a policy. Raises ``KeyError`` for an unknown builder."""
    allowed = Allowance(tree, policy)
    samples: list[Sample] = []
    shown: Counter[str] = Counter()
    trained: Counter[str] = Counter()
    for plan in BUILDERS[builder](tree):
        sample = assemble(plan, allowed)
        if not sample.mask.any():
            continue
        samples.append(sample)
        for piece in plan.branch.pieces:
            span = piece.span
            shown[span.id] = max(shown[span.id], piece.take)
            if span.kind is SpanKind.SAMPLED:
                within = sample.mask[span.start : span.start + piece.take]
                trained[span.id] += int(np.count_nonzero(within))
    total = sum(trained.values())
    weighted = (replace(s, weight=float(np.count_nonzero(s.mask)) / total) for s in samples)
    return Built(tuple(weighted), _account(tree, allowed, shown, trained))


class Allowance:
    """What the policy says of every sampled span of a session."""

    def __init__(self, tree: SessionTree, policy: TrainablePolicy) -> None:
        self._reasons: dict[str, str | None] = {}
        self._tokens: dict[str, NDArray[np.bool_]] = {}
        self._token_reasons: dict[str, list[tuple[int, int, str]]] = {}
        for row in tree.sampled():
            span = row.span
            call = tree.calls.get(span.call_id)
            reason = "call_missing" if call is None else untrainable(policy, call, row)
            allowed = np.full(len(span.token_ids), reason is None)
            refused: list[tuple[int, int, str]] = []
            for start, end, version in version_ranges(span):
                found = version_reason(policy, version)
                if reason is None and found is not None:
                    allowed[start:end] = False
                    refused.append((start, end, found))
            self._reasons[span.id] = reason
            self._tokens[span.id] = allowed
            self._token_reasons[span.id] = refused

    def tokens(self, span_id: str) -> NDArray[np.bool_]:
        """``bool[T]``: which tokens of a sampled span may be trained."""
        return self._tokens[span_id]

    def refused(self, span_id: str, start: int, end: int) -> Counter[str]:
        """Tokens of ``[start, end)`` that may not be trained, by reason."""
        counts: Counter[str] = Counter()
        if start == end:
            return counts
        reason = self._reasons[span_id]
        if reason is not None:
            counts[reason] = end - start
            return counts
        for low, high, why in self._token_reasons[span_id]:
            overlap = min(end, high) - max(start, low)
            if overlap > 0:
                counts[why] += overlap
        return counts


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


def assemble(plan: Plan, allowed: Allowance) -> Sample:
    """Lays a branch's spans end to end; weight 0 until all of the session's samples are known."""
    branch, length = plan.branch, plan.branch.length
    token_ids = np.empty(length, dtype=np.uint32)
    mask = np.zeros(length, dtype=np.bool_)
    logprobs = np.zeros(length, dtype=np.float32)
    versions = np.full(length, -1, dtype=np.int64)
    calls = np.full(length, -1, dtype=np.int32)
    shares = {share.span_id: share.start for share in plan.shares}
    call_ids: dict[str, int] = {}
    for piece in branch.pieces:
        span, take = piece.span, piece.take
        at = slice(span.start, span.start + take)
        token_ids[at] = span.token_ids[:take]
        if span.kind is not SpanKind.SAMPLED:
            continue
        index = call_ids.setdefault(span.call_id, len(call_ids))
        calls[at] = index
        scored = min(take, len(_scores(span)))
        logprobs[span.start : span.start + scored] = _scores(span)[:scored]
        for start, end, run in version_ranges(span):
            versions[span.start + start : span.start + min(end, take)] = run.version
        if span.id in shares:
            fresh = slice(span.start + shares[span.id], span.start + take)
            mask[fresh] = allowed.tokens(span.id)[shares[span.id] : take]
    return Sample(
        session_id=branch.leaf.session_id,
        leaf_call_id=branch.leaf.id,
        kind=branch.leaf.kind,
        role=branch.leaf.role,
        token_ids=token_ids,
        mask=mask,
        logprobs=logprobs,
        versions=versions,
        calls=calls,
        call_ids=tuple(call_ids),
        weight=0.0,
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
        seen = shown.get(span_id, 0)
        captured += length
        masked.update(allowed.refused(span_id, 0, seen))
        dropped.update(allowed.refused(span_id, seen, length))
        missing = int(np.count_nonzero(allowed.tokens(span_id))) - trained.get(span_id, 0)
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
