"""The latest requests of a session as they were read, so that the next one costs by what is new.

Harnesses send their whole history with every call. A :class:`Trail` keeps a request's messages, the
steps that they were cut into, and the line of recorded calls that the search followed through them.
A request that begins with the same messages takes these over and reads on from there. Messages are
the same if they are equal, never because digests of them are. A trail is a cache: without it, the
same is computed from the whole request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from bridle.proxy.session.digests import Unit
from bridle.proxy.session.match import Place
from bridle.proxy.session.turn import Key, TurnIndex
from bridle.proxy.wire.canonical import Message
from bridle.proxy.wire.histories import History
from bridle.proxy.wire.written import Written

WORTH_KEEPING: Final = 16
"""Number of messages below which a request costs less to read than to remember."""
_KEPT: Final = 4
"""Number of conversations that are remembered of a session, for sub-agents that take turns."""
_KEPT_UNRELATED: Final = 16
"""Number of conversations that are remembered of all anonymous sessions."""
_REWRITTEN: Final = 8
"""Number of messages at the end of a trail that may be others in the request that replaces it."""
_MESSAGE_BYTES: Final = 700
"""Approximate bytes of a message and its step, without its text."""


class Step(msgspec.Struct, frozen=True, gc=False):
    """A place to which the search led in one way only."""

    place: Place
    reach: int
    """Number of leading steps of the request that decided about this place and those before."""


class Trail(msgspec.Struct, eq=False):
    """One request as it was read."""

    messages: tuple[Message, ...]
    units: tuple[Unit, ...] = ()
    digests: tuple[bytes, ...] = ()
    forms: tuple[bytes, ...] = ()
    line: tuple[Step, ...] = ()
    """The places from the root on, as far as nothing but a new call can change them."""
    expanded: dict[Key, int] = {}
    """The keys under which calls were looked for before each place of ``line``, with its index: a
    new call under one of them is another way to go on."""
    chain: list[int] = msgspec.field(default_factory=lambda: [0])
    """The hashes of the first steps, as of :func:`bridle.proxy.session.turn.chained`."""
    barren: int = 0
    """Number of the first calls from the root with the request's first step of which it repeats no
    reply, not even in part; 0 if it repeats one."""
    removals: int = 0
    added: int = 0
    """The index's counts at the time of the search."""
    written: Written = msgspec.field(default_factory=Written)
    """The first of the messages as JSON for the engine, with its own tool-call ids."""
    history: History | None = None
    """The body from which the messages were read, if its dialect can be read on."""
    text: int = 0
    """Number of characters in the messages."""
    textual: int = 0
    """Number of leading messages whose contents are text alone."""

    def look_for_text(self, before: Trail | None, count: int) -> None:
        """Set :attr:`textual`; ``before`` has the first ``count`` of the messages."""
        self.textual = 0 if before is None else min(before.textual, count)
        for message in self.messages[self.textual :]:
            if not is_text(message.content):
                return
            self.textual += 1

    @property
    def size(self) -> int:
        """Approximate number of bytes held: messages, their JSON for the engine, and the body."""
        body = 0 if self.history is None else len(self.history.body)
        return _MESSAGE_BYTES * len(self.messages) + 2 * self.text + body


class Ways:
    """The line of a search that is running: it goes on while there is one way only."""

    def __init__(self, trail: Trail, line: tuple[Step, ...]) -> None:
        self.single = True
        """True if there was one way at each place so far."""
        self._trail = trail
        self._line = list(line)
        known = trail.expanded
        if len(known) > 2 * len(line):
            # Keys that are added to the dictionary of an earlier trail only shorten its line.
            known = {key: at for key, at in known.items() if at < len(line)}
        self._expanded = known if line else {}

    @property
    def reach(self) -> int:
        """The reach of the last place."""
        return self._line[-1].reach if self._line else 0

    def add(self, step: Step, keys: Iterable[Key]) -> None:
        """Add the place to which the only way leads, and the keys under which it was found."""
        for key in keys:
            self._expanded[key] = len(self._line)
        self._line.append(step)

    def keep(self, index: TurnIndex) -> None:
        """Put the line into the trail."""
        trail = self._trail
        trail.line, trail.expanded = tuple(self._line), self._expanded
        trail.removals, trail.added = index.removals, len(index.added)


class Trails:
    """The trails of one index of turns; the latest is the last."""

    def __init__(self, index: TurnIndex) -> None:
        self.index = index
        self._kept: list[Trail] = []
        self._most = _KEPT_UNRELATED if index.unrelated else _KEPT

    @property
    def size(self) -> int:
        """Approximate number of bytes held."""
        return sum([trail.size for trail in self._kept])

    def clear(self) -> None:
        self._kept.clear()

    def closest(self, messages: Sequence[Message]) -> tuple[Trail | None, int]:
        """Return the trail that shares most leading messages with a request, and their number."""
        best: Trail | None = None
        most = 0
        for trail in reversed(self._kept):
            count = shared(trail.messages, messages)
            if count > most:
                best, most = trail, count
            if count >= len(trail.messages) - _REWRITTEN:
                break
        return best, most

    def histories(self) -> list[History]:
        """Return the bodies that a new one may go on from, the latest first."""
        return [trail.history for trail in reversed(self._kept) if trail.history is not None]

    def usable(self, trail: Trail, units: int) -> tuple[Step, ...]:
        """Return the part of the trail's line that the first ``units`` of its steps decide.

        The index may have changed since. What it holds now decides, as if nothing were remembered.
        """
        index = self.index
        if trail.removals != index.removals:
            return ()
        end = len(trail.line)
        for key in index.added[trail.added :]:
            end = min(end, trail.expanded.get(key, end))
        while end and (trail.line[end - 1].reach > units or trail.line[end - 1].place.end > units):
            end -= 1
        return trail.line[:end]

    def keep(self, trail: Trail, before: Trail | None, count: int) -> None:
        """Remember ``trail``, which shares ``count`` messages with ``before``."""
        if len(trail.messages) < WORTH_KEEPING:
            return
        kept, trail.text = self._kept, 0
        if before is not None:
            trail.text = before.text if count == len(before.messages) else _text(trail, 0, count)
        trail.text += _text(trail, count, len(trail.messages))
        if before is not None and count >= len(before.messages) - _REWRITTEN and before in kept:
            kept.remove(before)
        elif len(kept) >= self._most:
            del kept[0]
        kept.append(trail)


def _text(trail: Trail, start: int, end: int) -> int:
    """Return the number of characters in ``messages[start:end]`` of the trail."""
    length = 0
    for message in trail.messages[start:end]:
        content = message.content
        length += len(content) if isinstance(content, str) else len(str(content))
        length += len(message.reasoning or "")
        for call in message.tool_calls:
            length += len(call.arguments)
    return length


def is_text(content: str | Sequence[Mapping[str, Any]] | None) -> bool:
    """Return whether a message's content is text alone."""
    if content is None or isinstance(content, str):
        return True
    return all(part.get("type") == "text" for part in content)


def shared(one: Sequence[Message], other: Sequence[Message]) -> int:
    """Return the number of leading messages that two conversations share."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a is not b and a != b), length)
