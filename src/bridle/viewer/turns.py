"""A session's turns as the pages show them: their tree, and their tokens with rulings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bridle.diagnosis.transcript import Turn
from bridle.reconstruct.samples.rules import DEFAULT_RULES, Ruling, trainable
from bridle.reconstruct.session import LoadedSession
from bridle.reconstruct.tree import version_ranges
from bridle.store.reading.accounts import trained_spans
from bridle.store.reading.conversation import ReplyId
from bridle.store.reading.damage import DamagedRows
from bridle.store.reading.queries import CallRow, SpanRow
from bridle.store.records import CallKind, Logprobs, SpanKind
from bridle.store.trained import TrainedSpan

TokenTexts = Callable[[Sequence[int]], list[str]]
"""A function from the ids of successive tokens to their texts."""


def as_tree(turns: Sequence[Turn]) -> list[tuple[Turn, int]]:
    """Return the turns with their depths.

    A turn comes below the turn that it continues. It is one deeper if a later turn continues the
    same one, or if it broke. A sub-agent, which continues none, is one deeper than the turn after
    which it began.
    """
    below: dict[int | None, list[Turn]] = {}
    began_after = None
    for turn in turns:
        agent = turn.call.kind is CallKind.SUBAGENT
        above = began_after if agent and turn.continues is None else turn.continues
        below.setdefault(above, []).append(turn)
        if not agent and turn.call.kind not in (CallKind.SIDE, CallKind.COUNT):
            began_after = turn.number
    rows: list[tuple[Turn, int]] = []
    waiting = [(turn, 0) for turn in reversed(below.get(None, []))]
    while waiting:
        turn, depth = waiting.pop()
        rows.append((turn, depth))
        children = below.get(turn.number, [])
        for index, child in reversed(list(enumerate(children))):
            last = index == len(children) - 1
            plain = last and child.continues is not None and child.call.break_reason is None
            waiting.append((child, depth + (not plain)))
    return rows


def token_strip(
    session: LoadedSession, call: CallRow, texts: TokenTexts, *, observed: bool
) -> dict[str, Any]:
    """Return a call's tokens as JSON-ready data: the sampled ones by choice.

    With ``observed``, the prompt's tokens that this call brought are included.

    A token is ``[id, text, logprob, version, reason, trainer's logprob, entropy]``. All but the
    first two are ``None`` for an observed token. ``reason`` is also ``None`` for a sampled token
    that is trained, and the last two for one that no training has scored. A strip with such scores
    has ``scored``: the run, the step and the policy version that gave them. ``damage`` says which
    scores cannot be read.
    """
    strips: list[dict[str, Any]] = []
    scores: Mapping[ReplyId, TrainedSpan] = {}
    damage = None
    try:
        scores = trained_spans(session.reader, [call.id])
    except DamagedRows as error:
        damage = str(error)
    if observed:
        brought = [
            row
            for row in session.spans
            if row.span.call_id == call.id and row.span.kind is SpanKind.OBSERVED
        ]
        for row in brought:
            ids = row.span.token_ids.tolist()
            shown = zip(ids, texts(ids), strict=True)
            tokens = [[token, text, *[None] * 5] for token, text in shown]
            strips.append({"name": "new in the prompt", "start": row.span.start, "tokens": tokens})
    decided = trainable(call, session, DEFAULT_RULES)
    for row in session.sampled.get(call.id, ()):
        choice = row.choice or 0
        name = "sampled" if choice == 0 else f"sampled, choice {choice}"
        by = scores.get(ReplyId(call.id, choice))
        tokens = _sampled(row, decided.get(choice, Ruling(0)), texts, by)
        scored = (
            None if by is None else {"run": by.run_id, "step": by.step + 1, "version": by.version}
        )
        strips.append({"name": name, "start": row.span.start, "tokens": tokens, "scored": scored})
    return {"strips": strips, "damage": damage}


def _sampled(
    row: SpanRow, ruling: Ruling, texts: TokenTexts, by: TrainedSpan | None
) -> list[list[Any]]:
    span = row.span
    ids = span.token_ids.tolist()
    reasons: list[str | None] = [None] * len(ids)
    for start, end, reason in ruling.excluded:
        reasons[start:end] = [reason] * (end - start)
    versions = [-1] * len(ids)
    for start, end, run in version_ranges(span) if span.versions else ():
        versions[start:end] = [run.version] * (end - start)
    given = (None, None) if by is None else (by.logprobs, by.entropies)
    engine, trainer, entropy = (_numbers(values, len(ids)) for values in (span.logprobs, *given))
    columns = (ids, texts(ids), engine, versions, reasons, trainer, entropy)
    return [list(token) for token in zip(*columns, strict=True)]


def _numbers(values: Logprobs | None, length: int) -> list[float | None]:
    """Return ``length`` numbers; ``None`` for NaN, and where ``values`` has ended."""
    given = [] if values is None else values[:length].tolist()
    padded = given + [None] * (length - len(given))
    return [None if number is None or number != number else number for number in padded]
