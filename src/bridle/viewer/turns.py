"""A session's turns as the pages show them: messages, times, tokens with their rulings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from bridle.reconstruct.conversation import new_messages
from bridle.reconstruct.samples.rules import DEFAULT_RULES, Ruling, rulings
from bridle.reconstruct.session import LoadedSession
from bridle.reconstruct.tree import version_ranges
from bridle.store.reading.queries import CallRow, SpanRow
from bridle.store.records import CallStatus, Message, SpanKind

TokenText = Callable[[int], str]
"""The text of one token id."""


@dataclass(frozen=True, slots=True)
class ShownToolCall:
    """A tool call with its arguments made readable."""

    name: str
    arguments: str
    id: str


@dataclass(frozen=True, slots=True)
class ShownMessage:
    """A message as a page shows it."""

    role: str
    text: str
    reasoning: str | None
    tool_calls: tuple[ShownToolCall, ...]
    tool_call_id: str | None
    choice: int | None
    """Of a reply; ``None`` for a message of the request."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of a session."""

    number: int
    call: CallRow
    continues: int | None
    """The turn whose reply it continues."""
    asked: tuple[ShownMessage, ...]
    replies: tuple[ShownMessage, ...]
    trained: int
    excluded: Mapping[str, int]
    """Sampled tokens that the default rules do not train, by reason."""
    rewards: Mapping[str, float]
    evidence: str
    """Why the call has its kind."""

    @property
    def running(self) -> bool:
        return self.call.status is CallStatus.OPEN

    @property
    def seconds(self) -> float | None:
        """From the request to the end of the reply."""
        return None if self.call.ended_at is None else self.call.ended_at - self.call.started_at

    @property
    def first_token(self) -> float | None:
        """Seconds from the request to the first token."""
        at = self.call.first_token_at
        return None if at is None else at - self.call.started_at


def turns_of(session: LoadedSession) -> list[Turn]:
    """All turns, in the order of their start."""
    numbers = {call_id: number for number, call_id in enumerate(session.by_id, start=1)}
    decided = _decided(session)
    names = {reward.name for reward in session.all_rewards if reward.call_id is not None}
    given = {name: session.turn_rewards(name) for name in sorted(names)}
    turns = []
    for call in session.calls:
        own = decided.get(call.id, ())
        excluded: dict[str, int] = {}
        for ruling in own:
            for reason, tokens in ruling.reasons(0, ruling.tokens).items():
                excluded[reason] = excluded.get(reason, 0) + tokens
        captured = sum(ruling.tokens for ruling in own)
        verdict = session.verdicts.get(call.id)
        turns.append(
            Turn(
                number=numbers[call.id],
                call=call,
                continues=numbers.get(call.parent_call_id or ""),
                asked=tuple(shown(message) for message in new_messages(call)),
                replies=tuple(shown(m, choice) for choice, m in enumerate(call.replies)),
                trained=captured - sum(excluded.values()),
                excluded=excluded,
                rewards={name: of[call.id] for name, of in given.items() if call.id in of},
                evidence="" if verdict is None else verdict.evidence,
            )
        )
    return turns


def _decided(session: LoadedSession) -> dict[str, list[Ruling]]:
    found: dict[str, list[Ruling]] = {}
    for reply, ruling in rulings(session, DEFAULT_RULES).items():
        found.setdefault(reply.call_id, []).append(ruling)
    return found


def as_tree(turns: Sequence[Turn]) -> list[tuple[Turn, int]]:
    """The turns with their depths: each below the turn that it continues, and one deeper when a
    later turn continues the same, or when it broke."""
    below: dict[int | None, list[Turn]] = {}
    for turn in turns:
        below.setdefault(turn.continues, []).append(turn)
    rows: list[tuple[Turn, int]] = []
    waiting = [(turn, 0) for turn in reversed(below.get(None, []))]
    while waiting:
        turn, depth = waiting.pop()
        rows.append((turn, depth))
        children = below.get(turn.number, [])
        for index, child in reversed(list(enumerate(children))):
            deeper = index < len(children) - 1 or child.call.break_reason is not None
            waiting.append((child, depth + deeper))
    return rows


def shown(message: Message, choice: int | None = None) -> ShownMessage:
    """A message with its content as text and its arguments as indented JSON."""
    return ShownMessage(
        message.role,
        content_text(message.content),
        message.reasoning,
        tuple(ShownToolCall(c.name, readable(c.arguments), c.id) for c in message.tool_calls),
        message.tool_call_id,
        choice,
    )


def content_text(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """The text of a message's content; parts that are no text are named in brackets."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text") or f"[{part.get('type', 'part')}]") for part in content)


def readable(text: str) -> str:
    """JSON indented; other text as it is."""
    try:
        return orjson.dumps(orjson.loads(text), option=orjson.OPT_INDENT_2).decode()
    except orjson.JSONDecodeError:
        return text


def token_strip(
    session: LoadedSession, call: CallRow, text: TokenText, *, observed: bool
) -> dict[str, Any]:
    """A call's tokens as JSON-ready data: the sampled ones by choice, and with ``observed`` the
    prompt's tokens that this call brought.

    A token is ``[id, text, logprob, version, reason]``; the last three are ``None`` for an observed
    token, and ``reason`` is also ``None`` for a sampled token that is trained.
    """
    strips = []
    if observed:
        brought = [
            row
            for row in session.spans
            if row.span.call_id == call.id and row.span.kind is SpanKind.OBSERVED
        ]
        for row in brought:
            tokens = [[int(t), text(int(t)), None, None, None] for t in row.span.token_ids]
            strips.append({"name": "new in the prompt", "start": row.span.start, "tokens": tokens})
    decided = {
        reply.choice: ruling
        for reply, ruling in rulings(session, DEFAULT_RULES).items()
        if reply.call_id == call.id
    }
    for row in session.sampled.get(call.id, ()):
        choice = row.choice or 0
        name = "sampled" if choice == 0 else f"sampled, choice {choice}"
        tokens = _sampled(row, decided.get(choice, Ruling(0)), text)
        strips.append({"name": name, "start": row.span.start, "tokens": tokens})
    return {"strips": strips}


def _sampled(row: SpanRow, ruling: Ruling, text: TokenText) -> list[list[Any]]:
    span = row.span
    reasons: list[str | None] = [None] * len(span.token_ids)
    for start, end, reason in ruling.excluded:
        reasons[start:end] = [reason] * (end - start)
    versions = [-1] * len(span.token_ids)
    for start, end, run in version_ranges(span) if span.versions else ():
        versions[start:end] = [run.version] * (end - start)
    logprobs = [None] * len(span.token_ids) if span.logprobs is None else span.logprobs.tolist()
    return [
        [int(token), text(int(token)), logprob, version, reason]
        for token, logprob, version, reason in zip(
            span.token_ids, logprobs, versions, reasons, strict=True
        )
    ]
