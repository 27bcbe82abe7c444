"""An imported session: its replies, what came before each, and which one each continues."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import orjson

from bridle.errors import UsageError
from bridle.store.records import Message, ToolCall

_NAME_CHARACTERS: Final = 24


class NotReadable(UsageError):
    """A file is not of the format that it was read as. The message has the file and the line."""


@dataclass(frozen=True, slots=True)
class ImportedTurn:
    """A reply of a model."""

    brought: tuple[Message, ...]
    """The messages between the reply that it continues and this one."""
    reply: Message
    continues: int | None = None
    """The index of the turn that it continues, in its session; ``None`` for the first one."""
    model: str | None = None
    at: float | None = None
    """The time of the request, in seconds since 1970."""
    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ImportedSession:
    """A session as a file has it."""

    name: str
    """A name that the same content always has, by which a second import finds it."""
    turns: tuple[ImportedTurn, ...]
    harness: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, Any] = field(default_factory=dict)


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file with one in each line. Raise :class:`NotReadable`."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                found = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise NotReadable(f"{path}, line {number}: not JSON ({error})") from error
            if not isinstance(found, dict):
                raise NotReadable(f"{path}, line {number}: not a JSON object")
            yield found


def name_of(form: str, content: Any) -> str:
    """Return the name of a session without an id, from its content."""
    digest = hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()
    return f"{form}-{digest[:_NAME_CHARACTERS]}"


def chain(messages: Sequence[tuple[Message, bool]], **of_each: Any) -> tuple[ImportedTurn, ...]:
    """Return a conversation's turns, one for each message whose flag says that a model wrote it.

    Messages after the last of them are left out. ``of_each`` are further fields of every turn.
    """
    turns: list[ImportedTurn] = []
    brought: list[Message] = []
    for message, sampled in messages:
        if not sampled:
            brought.append(message)
            continue
        before = len(turns) - 1 if turns else None
        turns.append(ImportedTurn(tuple(brought), message, before, **of_each))
        brought = []
    return tuple(turns)


def as_recorded(
    role: Any, content: Any, reasoning: str | None, calls: Sequence[ToolCall], **fields: Any
) -> Message:
    """Return a message of an export with the newlines that a recorded one has.

    Exports leave out those that chat templates write (:mod:`bridle.reconstruct.exports.messages`).
    """
    if reasoning is not None:
        reasoning = f"\n{reasoning}\n"
        content = f"\n\n{content}" if isinstance(content, str) and content else content
    if calls and isinstance(content, str) and content:
        content = f"{content}\n"
    return Message(role, content, reasoning, tuple(calls), **fields)


def seconds(text: Any) -> float | None:
    """Return the time of an ISO 8601 text, or ``None`` if it is none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError):
        return None
