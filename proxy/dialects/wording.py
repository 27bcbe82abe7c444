"""Other words in the bodies of a provider's API, at the places that a re-entry changes.

Everything else of a body stays as it is, opaque fields included, and a body in which nothing
changes keeps its bytes. A dialect names the places in its :class:`Wording`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import pairwise
from typing import Any, Final, NamedTuple

from bridle.proxy.wire.sse import END_OF_EVENT

_DATA: Final = re.compile(rb"(?m)^(data: ?)([^\r\n]*)")
_MARKS: Final = ("type", "cache_control")
"""Fields that clients write otherwise from request to request, and that are no words."""

Change = Callable[[str], str]


class Piece(NamedTuple):
    """A piece of a tool call's arguments in an event of a stream."""

    call: Hashable
    """The place of the tool call in the reply."""
    holder: dict[str, Any]
    """The object in the event that has the text."""
    field: str

    @property
    def text(self) -> str:
        return str(self.holder[self.field])


class Wording(NamedTuple):
    """The places of words in a dialect's bodies.

    A place of a tool call is named by two fields of one object: one that identifies the object, and
    the one that has the words.
    """

    conversation: tuple[str, ...]
    """The fields of a request that have the instructions, the tools and the messages."""
    arguments: tuple[tuple[str, str], ...]
    """The arguments of tool calls, as JSON or as its text."""
    results: tuple[str, str]
    """The results of tools."""
    pieces: Callable[[dict[str, Any]], Iterable[Piece]] = lambda event: ()
    """Finds the pieces of arguments in an event of a stream."""

    def changed(self, value: Any, arguments: Change, results: Change | None = None) -> Any:
        """Return decoded JSON with other arguments and results of tools."""
        if isinstance(value, list):
            return [self.changed(one, arguments, results) for one in value]
        if not isinstance(value, dict):
            return value
        made: dict[str, Any] = {}
        for name, inner in value.items():
            if any(name == field and mark in value for mark, field in self.arguments):
                made[name] = _changed_text(inner, arguments)
            elif results is not None and name == self.results[1] and self.results[0] in value:
                made[name] = filled(inner, map(_on_texts(results), scalars(inner)))
            else:
                made[name] = self.changed(inner, arguments, results)
        return made


class ReplyWords:
    """Changes the arguments of the tool calls in the bytes of one reply.

    The last piece of a call's arguments is held until they are whole, and gets all of their text.
    """

    def __init__(self, wording: Wording, change: Change) -> None:
        self._wording = wording
        self._change = change
        self._held: tuple[bytes, dict[str, Any], Piece, str] | None = None
        """An event, decoded as well, its last piece, and the text up to there."""

    def recorded(self, body: bytes) -> bytes:
        """Return a recorded reply, streamed or not."""
        if body.lstrip()[:1] in (b"{", b"["):
            return self.whole(body)
        return self.events(body) + self.end()

    def whole(self, body: bytes) -> bytes:
        """Return a reply that is one JSON value. Bytes that are none stay as they are."""
        given = _decoded(body)
        worded = self._wording.changed(given, self._change)
        return body if worded == given else json.dumps(worded).encode()

    def events(self, body: bytes) -> bytes:
        """Return the bytes for whole events of a stream, without those that are held."""
        ends = [0, *(end.end() for end in END_OF_EVENT.finditer(body)), len(body)]
        return b"".join(self._event(body[a:b]) for a, b in pairwise(ends) if a < b)

    def end(self) -> bytes:
        if self._held is None:
            return b""
        (raw, event, piece, text), self._held = self._held, None
        piece.holder[piece.field] = self._change(text)
        return _written(raw, event)

    def _event(self, raw: bytes) -> bytes:
        data = _DATA.findall(raw)
        event = _decoded(data[0][1]) if len(data) == 1 else None
        if not isinstance(event, dict):
            return self.end() + raw
        if event.get("type") == "ping":
            return raw
        pieces = list(self._wording.pieces(event))
        if pieces:
            return self._pieces(raw, event, pieces)
        worded = self._wording.changed(event, self._change)
        return self.end() + (raw if worded == event else _written(raw, worded))

    def _pieces(self, raw: bytes, event: dict[str, Any], pieces: list[Piece]) -> bytes:
        text, before = "", b""
        if self._held is not None and self._held[2].call == pieces[0].call:
            (earlier, held, piece, text), self._held = self._held, None
            piece.holder[piece.field] = ""
            before = _written(earlier, held)
        else:
            before = self.end()
        *others, last = pieces
        for one in others:
            one.holder[one.field], text = self._change(text + one.text), ""
        self._held = raw, event, last, text + last.text
        return before


def scalars(value: Any) -> Iterator[Any]:
    """Yield the words and numbers of decoded JSON in their order."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name not in _MARKS:
                yield from scalars(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from scalars(inner)
    else:
        yield value


def filled(value: Any, words: Iterator[Any]) -> Any:
    """Return ``value`` with other :func:`scalars`."""
    if isinstance(value, dict):
        return {
            name: inner if name in _MARKS else filled(inner, words) for name, inner in value.items()
        }
    if isinstance(value, list):
        return [filled(inner, words) for inner in value]
    return next(words)


def _on_texts(change: Change) -> Callable[[Any], Any]:
    return lambda value: change(value) if isinstance(value, str) else value


def _changed_text(value: Any, change: Change) -> Any:
    if isinstance(value, str):
        return change(value)
    text = json.dumps(value)
    worded = change(text)
    return value if worded == text else json.loads(worded)


def _decoded(data: bytes) -> Any:
    """Return decoded JSON, or ``None`` for bytes that are none."""
    try:
        return json.loads(data)
    except ValueError:
        return None


def _written(raw: bytes, event: Any) -> bytes:
    return _DATA.sub(lambda found: found[1] + json.dumps(event).encode(), raw)
