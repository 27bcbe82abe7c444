"""A session's turns for people to read: messages, times, and which tokens are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from bridle.reconstruct.conversation import new_messages
from bridle.reconstruct.samples.rules import DEFAULT_RULES, Ruling, rulings
from bridle.reconstruct.session import LoadedSession
from bridle.store.reading.queries import CallRow
from bridle.store.records import CallStatus, Message

FOLDED: Final = 400
"""Maximum characters of a system prompt that is shown whole."""


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
    """The choice index of a reply; ``None`` for a message of the request."""

    @property
    def folded(self) -> bool:
        """Return whether a page shows only the beginning: it is a long prompt of the harness."""
        return self.role in ("system", "developer") and len(self.text.strip("\n")) > FOLDED


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of a session."""

    number: int
    call: CallRow
    continues: int | None
    """The number of the turn whose reply it continues, if any."""
    asked: tuple[ShownMessage, ...]
    replies: tuple[ShownMessage, ...]
    trainable: int
    """Sampled tokens that the default rules allow to train, whether or not a run has."""
    excluded: Mapping[str, int]
    """Sampled tokens that the default rules do not allow to train, by reason."""
    rewards: Mapping[str, float]
    evidence: str
    """The reason for the call's kind."""

    @property
    def summary(self) -> str:
        """One line of what the reply does: its tools' names, and the beginning of its text."""
        names = ", ".join(call.name for reply in self.replies for call in reply.tool_calls)
        text = " ".join(" ".join(reply.text[:400] for reply in self.replies).split())
        return " · ".join(part for part in (names, text[:120]) if part)

    @property
    def running(self) -> bool:
        return self.call.status is CallStatus.OPEN

    @property
    def seconds(self) -> float | None:
        """Seconds from the request to the end of the reply; ``None`` if it has not ended."""
        return None if self.call.ended_at is None else self.call.ended_at - self.call.started_at

    @property
    def first_token(self) -> float | None:
        """Seconds from the request to the first token."""
        at = self.call.first_token_at
        return None if at is None else at - self.call.started_at


def turns_of(session: LoadedSession) -> list[Turn]:
    """Return all turns, in the order of their start."""
    numbers = {call_id: number for number, call_id in enumerate(session.by_id, start=1)}
    decided = _decided(session)
    names = {one.name for one in session.all_rewards if one.is_score and not one.whole}
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
                trainable=captured - sum(excluded.values()),
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


def shown(message: Message, choice: int | None = None) -> ShownMessage:
    """Return a message with its content as text and its arguments as indented JSON."""
    return ShownMessage(
        message.role,
        content_text(message.content),
        message.reasoning,
        tuple(ShownToolCall(c.name, readable(c.arguments), c.id) for c in message.tool_calls),
        message.tool_call_id,
        choice,
    )


def content_text(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """Return the text of a message's content. Parts that are not text are named in brackets."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text") or f"[{part.get('type', 'part')}]") for part in content)


def readable(text: str) -> str:
    """Return JSON indented, and other text unchanged."""
    try:
        return orjson.dumps(orjson.loads(text), option=orjson.OPT_INDENT_2).decode()
    except orjson.JSONDecodeError:
        return text


def lasted(seconds: float | None) -> str:
    """Format a duration in the largest unit that shows it well; ``–`` if it is not known."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
