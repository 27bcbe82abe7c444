"""Builders of samples from branches: three of them, with one assembly and one token account.

``tree`` (the default)
    Each branch is a sample. A sampled token that several branches share is trained in the first of
    them (in the order in which their last calls began) and is context in the others.
``merged``
    Each chain of calls that continue one another token by token is a sample, as in trainers that
    merge a rollout's turns by prefix. A second continuation of the same call starts a new sample.
``per_call``
    Each call is a sample, as in trainers that do not merge at all.

A branch on which the rules allow nothing to be trained makes no sample. The weight of a sample is
its share of the session's trained tokens, so that a session weighs 1 and its tokens weigh the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bridle.reconstruct.samples.rules import Ruling, SampleRules, rulings
from bridle.reconstruct.samples.sample import Conservation, KeptSets, Sample, sample_logprobs
from bridle.reconstruct.session import LoadedSession
from bridle.reconstruct.tree import Branch, SessionTree, SpanPiece, version_ranges
from bridle.store.reading.conversation import ReplyId
from bridle.store.reading.queries import SpanRow
from bridle.store.records import DEFAULT_POLICY, Span, SpanKind, TokenIds

BUILDER_VERSION: Final = 2
"""The version of the builders. It changes when the same session and rules would give other
samples."""


SamplePlans = Iterable[tuple[Branch, Mapping[str, int]]]
"""A branch for each sample, and the position from which on this sample trains each span, by span
id. Spans that are not named are context."""
Builder = Callable[[SessionTree], SamplePlans]


@dataclass(frozen=True, slots=True)
class Built:
    """A session's samples, and the account of its sampled tokens."""

    samples: tuple[Sample, ...]
    conservation: Conservation


def build(session: LoadedSession, rules: SampleRules, builder: str = "tree") -> Built:
    """Build the session's samples under the rules.

    Raise :class:`bridle.reconstruct.tree.BrokenTree`, and ``KeyError`` for an unknown builder.
    """
    tree, decided = session.tree, rulings(session, rules)
    branches: list[Branch] = []
    shown: dict[str, int] = {}
    trained: dict[str, int] = {}
    for path, starts in BUILDERS[builder](tree):
        branch = tuple(_with_trained(piece, starts.get(piece.span.id), decided) for piece in path)
        if not any(piece.trains for piece in branch):
            continue
        branches.append(branch)
        for piece in branch:
            span = piece.span
            if span.kind is SpanKind.SAMPLED:
                shown[span.id] = max(shown.get(span.id, 0), piece.take)
                trained[span.id] = trained.get(span.id, 0) + piece.trained
    total = sum(trained.values())
    samples = tuple(
        assemble(tree, branch, sum(piece.trained for piece in branch) / total)
        for branch in branches
    )
    return Built(samples, _account(tree, decided, shown, trained))


def not_built(session: LoadedSession) -> Conservation:
    """Return the account of a session whose tree is broken: all of its tokens are dropped."""
    captured = session.captured
    return Conservation(captured, 0, dropped={"tree_broken": captured} if captured else {})


def _with_trained(
    piece: SpanPiece, start: int | None, decided: Mapping[ReplyId, Ruling]
) -> SpanPiece:
    if start is None:
        return piece
    return SpanPiece(piece.row, piece.take, _ruling(decided, piece.row).ranges(start, piece.take))


def _ruling(decided: Mapping[ReplyId, Ruling], row: SpanRow) -> Ruling:
    ruling = decided.get(ReplyId(row.span.call_id, row.choice or 0))
    if ruling is None:
        tokens = len(row.span.token_ids)
        return Ruling(tokens, ((0, tokens, "call_missing"),))
    return ruling


def plan_tree(tree: SessionTree) -> SamplePlans:
    """Plan a sample for every branch.

    A shared sampled token belongs to the first branch that reaches it.
    """
    reached: dict[str, int] = {}
    for branch in tree.branches():
        starts: dict[str, int] = {}
        for piece in branch:
            before = reached.get(piece.span.id, 0)
            if piece.span.kind is SpanKind.SAMPLED and piece.take > before:
                starts[piece.span.id] = before
                reached[piece.span.id] = piece.take
        yield branch, starts


def plan_merged(tree: SessionTree) -> SamplePlans:
    """Plan one sample per unbroken chain of calls."""
    chains: dict[str, tuple[SpanRow, dict[str, int]]] = {}
    for row in tree.attached():
        above = _continues(tree, row)
        _, starts = chains.pop(above, (row, {})) if above is not None else (row, {})
        starts[row.span.id] = 0
        chains[row.span.id] = (row, starts)
    return [(tree.branch(row), starts) for row, starts in chains.values()]


def plan_per_call(tree: SessionTree) -> SamplePlans:
    """Plan one sample per sampled span."""
    return [(tree.branch(row), {row.span.id: 0}) for row in tree.attached()]


BUILDERS: Final[Mapping[str, Builder]] = {
    "tree": plan_tree,
    "merged": plan_merged,
    "per_call": plan_per_call,
}


def assemble(tree: SessionTree, branch: Branch, weight: float) -> Sample:
    """Build a sample by laying a branch's spans end to end."""
    leaf = branch[-1]
    call, length = tree.calls[leaf.span.call_id], leaf.span.start + leaf.take
    token_ids = np.empty(length, dtype=np.uint32)
    mask = np.zeros(length, dtype=np.bool_)
    logprobs = np.zeros(length, dtype=np.float32)
    versions = np.full(length, -1, dtype=np.int64)
    calls = np.full(length, -1, dtype=np.int32)
    call_ids: dict[str, int] = {}
    choices: list[int] = []
    counts = np.zeros(length, dtype=np.int64)
    sets: list[TokenIds] = []
    experts: NDArray[np.int16] | None = None
    for piece in branch:
        span, take = piece.span, piece.take
        experts = _with_experts(experts, span, take, length)
        if span.kept is not None:
            kept = span.kept.first(take)
            counts[span.start : span.start + take] = kept.counts
            sets.append(kept.ids)
        at = slice(span.start, span.start + take)
        token_ids[at] = span.token_ids[:take]
        if span.kind is not SpanKind.SAMPLED:
            continue
        calls[at] = call_ids.setdefault(span.call_id, len(call_ids))
        choices.append(piece.row.choice or 0)
        if span.logprobs is not None:
            scores = sample_logprobs(span.logprobs[:take])
            logprobs[span.start : span.start + len(scores)] = scores
        for start, end, run in version_ranges(span):
            versions[span.start + start : span.start + min(end, take)] = run.version
        for start, end in piece.trains:
            mask[span.start + start : span.start + end] = True
    return Sample(
        session_id=call.session_id,
        leaf_call_id=call.id,
        kind=call.kind,
        role=call.role,
        token_ids=token_ids,
        mask=mask,
        logprobs=logprobs,
        versions=versions,
        calls=calls,
        call_ids=tuple(call_ids),
        choices=tuple(choices),
        weight=weight,
        roles=tuple(tree.calls[call_id].role for call_id in call_ids),
        policies=tuple(tree.calls[call_id].policy or DEFAULT_POLICY for call_id in call_ids),
        samplers=tuple(tree.calls[call_id].sampler for call_id in call_ids),
        kept=KeptSets(np.cumsum(counts), np.concatenate(sets)) if sets else None,
        routed_experts=experts,
    )


def _with_experts(
    experts: NDArray[np.int16] | None, span: Span, take: int, length: int
) -> NDArray[np.int16] | None:
    """Add the experts of a span to those of a branch with ``length`` tokens."""
    own = span.routed_experts
    if own is None or (experts is not None and experts.shape[1:] != own.shape[1:]):
        return experts
    if experts is None:
        experts = np.full((length, *own.shape[1:]), -1, np.int16)
    experts[span.start : span.start + take] = own[:take]
    if span.start == 0:
        experts[0] = -1  # nothing stands before the first token
    return experts


def _account(
    tree: SessionTree,
    decided: Mapping[ReplyId, Ruling],
    shown: Mapping[str, int],
    trained: Mapping[str, int],
) -> Conservation:
    """Return the account of every sampled token of the session.

    Every builder trains all tokens that the rules allow. Any that are missing here are counted as
    ``not_delivered``, on which the audit fails.
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


def _continues(tree: SessionTree, row: SpanRow) -> str | None:
    """Return the id of the nearest sampled span above, or ``None``.

    The result is ``None`` unless all of that span is on this span's path.
    """
    end, link = row.span.start, row.span.parent_id
    while link is not None:
        above = tree.rows[link].span
        if above.start < end:
            if above.kind is SpanKind.SAMPLED:
                return above.id if above.end <= end else None
            end = above.start
        link = above.parent_id
    return None
