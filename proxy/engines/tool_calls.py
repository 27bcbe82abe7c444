"""The tool calls of one streamed choice, assembled from the pieces of any upstream.

Upstreams number parallel calls differently: by an index, by one index for all of them, or not at
all. A name may come after the arguments have begun, and the pieces of two calls may alternate. A
call is recognised here by its index, its id and its name together. The calls leave as events one
after another: nothing that follows a call is passed on before that call's arguments are a whole
JSON object. Every dialect but chat needs this last rule, because its clients run a call when the
next item begins.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from bridle.proxy.wire.canonical import ApiError, Event, ToolCallDelta
from bridle.store.records import Note

_STRUCTURE: Final = re.compile(r'["\\{}\[\]]')
_OPENING: Final = ("{", "[")
_ANOTHER: Final = re.compile(r"(?:^|[}\]])\s*[{\[]")
"""A place where a second object may begin, which is then checked more closely."""
_BY_NAME: Final = "tool_call_by_name"
_UNNAMED: Final = "unnamed"
"""The reason that is no note: the call so far has no name."""


class JsonProgress:
    """The progress of a JSON object that arrives in pieces.

    Its work is linear in the characters.
    """

    __slots__ = ("_after_escape", "_depth", "_in_string", "complete", "several")

    def __init__(self) -> None:
        self.complete = False
        """True if the text so far holds one whole object or array."""
        self.several = False
        """True if another one begins after it."""
        self._depth = 0
        self._in_string = False
        self._after_escape = False

    def feed(self, text: str) -> None:
        start = 0
        if self._after_escape and text:
            start, self._after_escape = 1, False
        while (match := _STRUCTURE.search(text, start)) is not None:
            start, sign = match.end(), match[0]
            if sign == '"':
                self._in_string = not self._in_string
            elif sign == "\\":
                start += self._in_string
                self._after_escape = self._in_string and start > len(text)
            elif not self._in_string:
                opens = sign in _OPENING
                self.several |= opens and self.complete and self._depth == 0
                self._depth += 1 if opens else -1
                self.complete |= not opens and self._depth == 0


class _Call:
    """A call that is being assembled."""

    __slots__ = (
        "_progress",
        "_scanned",
        "announced",
        "closed",
        "engine_id",
        "extra",
        "half",
        "name",
        "named_again",
        "ordinal",
        "pieces",
        "sent",
    )

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.engine_id: str | None = None
        self.name: str | None = None
        self.named_again = False
        """True if its name was sent again after the arguments were whole."""
        self.half = ""
        """The first half of a character whose second half is in the next piece."""
        self.pieces: list[str] = []
        self.sent = 0
        """Number of pieces that have left as events."""
        self.extra: dict[str, Any] = {}
        """Opaque fields that have not left yet."""
        self.announced = False
        self.closed = False
        """True if something that follows it has left."""
        self._progress = JsonProgress()
        self._scanned = 0

    @property
    def whole(self) -> bool:
        """Return whether the arguments so far are a whole JSON object.

        Each piece is scanned once.
        """
        for piece in self.pieces[self._scanned :]:
            self._progress.feed(piece)
        self._scanned = len(self.pieces)
        return self._progress.complete

    @property
    def several(self) -> bool:
        """Return whether the arguments are those of several calls."""
        return self.whole and self._progress.several

    @property
    def empty(self) -> bool:
        return not any(piece.strip() for piece in self.pieces)

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


class ToolCalls:
    """The tool calls of one choice.

    The class takes their pieces and the events between them, and returns events.
    """

    def __init__(
        self, choice: int, mint: Callable[[], str], tools: frozenset[str], notes: dict[Note, None]
    ) -> None:
        """Create an empty list of calls.

        ``mint`` makes the id of a further call; ``tools`` are the tool names that the request
        offers; each normalisation is added to ``notes``.
        """
        self._choice = choice
        self._mint = mint
        self._tools = tools
        self._notes = notes
        self._calls: list[_Call] = []
        self._slots: dict[int, _Call] = {}
        """The call that pieces with an index belong to, by index."""
        self._by_id: dict[str, _Call] = {}
        self._open: _Call | None = None
        """The call that leaves as its pieces arrive."""
        self._waiting: deque[_Call | Event] = deque()
        """The calls and events that follow the open call, in order."""

    def piece(
        self,
        index: int | None,
        engine_id: str | None,
        name: str | None,
        arguments: str,
        extra: Mapping[str, Any] | None = None,
        *,
        position: int = 0,
        alone: bool = True,
    ) -> list[Event]:
        """Return the events of one piece of a call.

        ``position`` is its place among the pieces of its chunk; ``alone`` is true if it is the only
        one.

        Raises :class:`ApiError` for a piece that can belong to no call.
        """
        call = self._known(index, engine_id, position, alone)
        if call is not None and name and self._repeats(call, engine_id, name, arguments):
            return []
        if call is not None and (why := self._another(call, engine_id, name, arguments)):
            name = name or (call.name if why == _BY_NAME else None)
            call = None
            if why != _UNNAMED:
                self._note(why, "parallel calls with one index or none")
        if call is None:
            call = self._begin(position if index is None else index)
        elif name and call.name is None:
            self._note("tool_call_name_late", name)
        elif name and call.name is not None and name != call.name:
            name = call.name + name
            self._note("tool_call_name_in_pieces", name)
        elif name and not engine_id:
            call.named_again = call.whole
        call.name = name or call.name
        if engine_id and call.engine_id is None:
            call.engine_id = engine_id
            self._by_id.setdefault(engine_id, call)
        if extra:
            call.extra.update(extra)
        self._add(call, arguments)
        return self._advance()

    def whole(
        self, engine_id: str | None, name: str | None, arguments: str, extra: Mapping[str, Any]
    ) -> list[Event]:
        """Return the events of a call that came in one piece, in a whole message."""
        call = self._begin(len(self._calls))
        call.engine_id, call.name, call.extra = engine_id, name or None, dict(extra)
        self._add(call, arguments)
        return self._advance()

    def between(self, event: Event) -> list[Event]:
        """Put ``event``, a text or a thought, in its place among the calls.

        Return the events that may leave now.
        """
        if self._open is None:
            return [event]
        self._waiting.append(event)
        return self._advance()

    def finish(self, *, cut: bool) -> list[Event]:
        """End the choice and return all events that were held back.

        ``cut`` is true if the token limit ended it.

        Raises :class:`ApiError` for a call without a name.
        """
        for call in self._calls:
            if call.name is None and not cut:
                raise _unreadable("a tool call without a name")
            if call.name is None:
                self._note("tool_call_cut", "before its name")
            elif not call.empty:
                self._check(call, cut)
        events: list[Event] = []
        queue: list[_Call | Event] = [self._open, *self._waiting] if self._open else []
        for held in queue:
            if not isinstance(held, _Call):
                events.append(held)
            elif held.name is not None:
                events += self._sent(held)
        self._open = None
        self._waiting.clear()
        return events

    def _check(self, call: _Call, cut: bool) -> None:
        """Note arguments that are not exactly one JSON object."""
        arguments = call.arguments.strip()
        try:
            value, end = json.JSONDecoder(strict=False).raw_decode(arguments)
        except (ValueError, RecursionError):
            self._note("tool_call_arguments_broken", "cut" if cut else str(call.name))
            return
        if arguments[end:].strip() or not isinstance(value, dict):
            self._note("tool_call_arguments_broken", str(call.name))

    def _known(
        self, index: int | None, engine_id: str | None, position: int, alone: bool
    ) -> _Call | None:
        """Return the call that a piece continues by its index or id.

        Return ``None`` if there is none.
        """
        by_id = self._by_id.get(engine_id) if engine_id else None
        if index is None:
            if by_id is not None or not self._calls:
                return by_id
            return self._calls[-1] if alone else self._slots.get(position)
        call = self._slots.get(index)
        if call is not None and by_id is not None and call.engine_id not in (None, engine_id):
            return by_id
        return call

    def _another(self, call: _Call, engine_id: str | None, name: str | None, arguments: str) -> str:
        """Return the reason why a piece that has the place of ``call`` begins another call.

        The reason is a note's name. It is empty if the piece is one of ``call``.
        """
        if engine_id and call.engine_id not in (None, engine_id):
            return "tool_call_by_id"
        if not name:
            # The name came again with nothing after it: that was the next call's beginning.
            return _BY_NAME if call.named_again and arguments.strip() else ""
        if call.name is None:
            # Nothing shows that the name is that of the arguments before it.
            return _UNNAMED if call.whole and not (engine_id or call.engine_id) else ""
        if name == call.name:
            return _BY_NAME if arguments.strip() and call.whole else ""
        joins = call.empty and not call.announced and f"{call.name}{name}" in self._tools
        return "" if joins else _BY_NAME

    def _repeats(self, call: _Call, engine_id: str | None, name: str, arguments: str) -> bool:
        """Return True if a piece repeats a whole call.

        Raises :class:`ApiError` for another call that has the same id.
        """
        if not engine_id or engine_id != call.engine_id or not arguments.strip():
            return False
        if name != call.name or not call.whole:
            return False
        if arguments.strip() != call.arguments.strip():
            raise _unreadable(f"two tool calls with the id {engine_id!r}")
        self._note("tool_call_repeated", name)
        return True

    def _begin(self, slot: int) -> _Call:
        call = _Call(len(self._calls))
        self._calls.append(call)
        self._slots[slot] = call
        if self._open is None:
            self._open = call
        else:
            self._waiting.append(call)
        return call

    def _add(self, call: _Call, arguments: str) -> None:
        if not arguments:
            return
        if call.closed:
            if not arguments.strip():
                return
            raise _unreadable(f"more of the tool call {call.name!r} after its end")
        if call.half or not arguments.isascii():
            arguments = self._whole_characters(call, arguments)
        call.pieces.append(arguments)
        if _ANOTHER.search(arguments) is not None and call.several:
            raise _unreadable(f"the arguments of several calls of {call.name!r} as one text")

    def _whole_characters(self, call: _Call, arguments: str) -> str:
        """``arguments`` after the half of a character that the call's last piece ended with.

        Their own last half is kept for the next piece, and other halves become U+FFFD.
        """
        if call.half:
            self._note("surrogate_pair_joined")
        wide = (call.half + arguments).encode("utf-16-le", "surrogatepass")
        text, call.half = wide.decode("utf-16-le", "surrogatepass"), ""
        if "\ud800" <= text[-1] <= "\udbff":
            call.half, text = text[-1], text[:-1]
        if any("\ud800" <= sign <= "\udfff" for sign in text):
            self._note("surrogate_replaced")
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return text

    def _advance(self) -> list[Event]:
        """Return the events that may leave now.

        They are the open call's new pieces, and the events after it once it is whole.
        """
        events: list[Event] = []
        while (call := self._open) is not None:
            if self._may_leave(call):
                events += self._sent(call)
            if not self._waiting or not call.announced or not call.whole:
                break
            call.closed = True
            self._open = None
            while self._waiting and self._open is None:
                following = self._waiting.popleft()
                if isinstance(following, _Call):
                    self._open = following
                else:
                    events.append(following)
        return events

    def _may_leave(self, call: _Call) -> bool:
        """Return True if the call's name is known.

        A name that no tool has may be the beginning of a longer one until arguments follow.
        """
        if call.announced:
            return True
        if call.name is None:
            return False
        return not self._tools or call.name in self._tools or not call.empty

    def _sent(self, call: _Call) -> list[Event]:
        arguments, call.sent = "".join(call.pieces[call.sent :]), len(call.pieces)
        extra, call.extra = call.extra or None, {}
        if call.announced:
            if not arguments and extra is None:
                return []
            return [ToolCallDelta(call.ordinal, None, None, arguments, self._choice, extra=extra)]
        call.announced = True
        return [
            ToolCallDelta(
                call.ordinal,
                self._mint(),
                call.name,
                arguments,
                self._choice,
                call.engine_id,
                extra,
            )
        ]

    def _note(self, name: str, detail: str = "") -> None:
        self._notes[Note(name, detail[:128])] = None


def _unreadable(problem: str) -> ApiError:
    return ApiError("upstream_error", f"the engine sent {problem}", status=502)
