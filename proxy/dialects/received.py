"""The reply of an upstream that speaks the client's dialect, read for the record.

The client gets the upstream's own bytes. A reader takes each event of them, puts the provider's
whole reply together, and reads it as the dialect reads a reply that a client echoes. Record and
echo therefore mean the same. The provider's own ids stay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import orjson

from bridle.proxy.dialects.body import Json
from bridle.proxy.dialects.transcript import Transcript
from bridle.proxy.dialects.unsupported import carried_upstream
from bridle.proxy.wire.canonical import (
    ApiError,
    Event,
    Finished,
    FinishReason,
    Message,
    ReasoningDelta,
    Request,
    Started,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from bridle.store.records import Note

_DONE: Final = b"[DONE]"


class ReceivedReply(ABC):
    """A reader of one reply."""

    def __init__(self, request: Request) -> None:
        self.over = False
        """Whether the event that ends the reply has come."""
        self.failure: ApiError | None = None
        """The error that the upstream reported within the reply."""
        self.identifier: str | None = None
        """The reply's id at the upstream."""
        self.model: str | None = None
        """The model that the upstream says it served."""
        self.usage: Usage | None = None
        self.notes: dict[Note, None] = {}
        self.contradiction: str | None = None
        """Always ``None``: a reply without token ids contradicts nothing."""
        self._request = request

    def take(self, payload: bytes) -> None:
        """Read one event of a stream."""
        if payload == _DONE:
            return
        if (event := self._read(payload)) is not None:
            self._take(event)

    def whole(self, body: bytes) -> None:
        """Read a reply that came whole."""
        if (reply := self._read(body)) is not None:
            self._whole(reply)
        self.over = True

    def events(self) -> list[Event]:
        """Return the canonical events of what has come so far."""
        events: list[Event] = [Started(None if self.usage is None else self.usage.prompt_tokens)]
        with carried_upstream():
            for choice, (message, reason, stop) in enumerate(self._choices()):
                events += _events_of(message, choice)
                if reason is not None:
                    events.append(Finished(reason, choice, stop))
        if self.usage is not None:
            events.append(self.usage)
        return events

    @abstractmethod
    def body(self) -> Json:
        """Return the provider's whole reply, opaque fields included, of what has come so far."""

    @abstractmethod
    def _take(self, event: Json) -> None: ...

    @abstractmethod
    def _whole(self, reply: Json) -> None: ...

    @abstractmethod
    def _choices(self) -> Iterator[tuple[Message, FinishReason | None, str | None]]:
        """Yield each choice's message, the reason of its end, and its stop sequence."""

    def _read(self, payload: bytes) -> Json | None:
        try:
            given = orjson.loads(payload)
        except orjson.JSONDecodeError:
            given = None
        if isinstance(given, dict):
            return given
        self._unread("not a JSON object")
        return None

    def _unread(self, detail: str) -> None:
        self.notes[Note("reply_unread", detail[:200])] = None

    def _message(self, add: Callable[[Transcript], object]) -> Message:
        """Return the assistant message that ``add`` adds to a transcript.

        What cannot be read is left out, with a note.
        """
        transcript = Transcript()
        try:
            add(transcript)
        except ApiError as error:
            self._unread(error.message)
        messages = [one for one in transcript.messages if one.role == "assistant"]
        self.notes |= dict.fromkeys(transcript.notes)
        if len(messages) <= 1:
            return messages[0] if messages else Message("assistant", "")
        texts = [one.content for one in messages if isinstance(one.content, str)]
        thoughts = [one.reasoning for one in messages if one.reasoning]
        calls = [call for one in messages for call in one.tool_calls]
        return Message(
            "assistant",
            "".join(texts) or None,
            reasoning="".join(thoughts),
            tool_calls=tuple(calls),
        )


def _events_of(message: Message, choice: int) -> Iterator[Event]:
    if message.reasoning:
        yield ReasoningDelta(message.reasoning, choice)
    if message.content and isinstance(message.content, str):
        yield TextDelta(message.content, choice)
    for index, call in enumerate(message.tool_calls):
        yield ToolCallDelta(index, call.id, call.name, call.arguments, choice)


class Pieces:
    """Texts that come in pieces, by the place and the name of each."""

    def __init__(self) -> None:
        self._pieces: defaultdict[Any, defaultdict[str, list[str]]] = defaultdict(
            lambda: defaultdict(list)
        )

    def add(self, place: Any, name: str, piece: Any) -> None:
        if isinstance(piece, str):
            self._pieces[place][name].append(piece)

    def at(self, place: Any) -> dict[str, str]:
        """Return the texts of a place by their names."""
        texts: Mapping[str, list[str]] = self._pieces.get(place, {})
        return {name: "".join(pieces) for name, pieces in texts.items()}


def child(value: Any, name: str) -> Json:
    """Return the object in a field of ``value``, or an empty one."""
    found = value.get(name) if isinstance(value, Mapping) else None
    return found if isinstance(found, dict) else {}


def count(value: Any, *names: str) -> int:
    """Return the sum of the fields that are numbers."""
    given = [value.get(name) for name in names] if isinstance(value, Mapping) else []
    return sum(int(one) for one in given if isinstance(one, int | float) and one > 0)


def text_of(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
