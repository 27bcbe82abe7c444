"""The array of messages of a client's body, read on from where an earlier body ended.

The elements of the array whose bytes are those of the earlier body are cut out, and only the rest
is decoded. The bytes are compared, so that no two histories are ever taken for each other. The cut
leaves a mark as the first element. If the mark is not the first element of the body's own array
after decoding, the cut was made elsewhere, and the body is decoded whole.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from bridle.proxy.wire.canonical import Message, Request
from bridle.store.encoding.bodies import common_bytes
from bridle.store.records import Note

SHORTEST: Final = 16_384
"""Bytes of a body below which it costs less to decode than to remember."""
_MARKED: Final = {"cut": secrets.token_hex(16)}
"""The element that stands for those that are cut out. No client knows it."""
_MARK: Final = msgspec.json.encode(_MARKED)
_ELEMENTS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])

ParseOn = Callable[[bytes, "Sequence[History]"], "tuple[Request, History | None]"]
"""A function from a body and the histories that it may go on from, the latest first, to a request
and its own history, which is ``None`` if it is not worth remembering. It raises as
:data:`bridle.proxy.wire.canonical.Parse` does."""


class History(msgspec.Struct, frozen=True, gc=False):
    """The array of messages in one body."""

    body: bytes
    start: int
    """Index of the first byte after the array's opening bracket."""
    ends: tuple[int, ...]
    """The index after each element of the array."""
    messages: tuple[Message, ...] = ()
    """The messages that were read, one for each element."""
    notes: tuple[Note, ...] = ()
    """The notes on these messages."""

    def shared(self, body: bytes, start: int) -> int:
        """Return the number of leading elements that the array at ``start`` of ``body`` repeats."""
        if not self.ends:
            return 0
        same = common_bytes(self.body, body, self.start, start)
        count = bisect_right(self.ends, self.start + same)
        moved = start - self.start
        while count and body[(end := self.ends[count - 1] + moved) : end + 1] not in (b",", b"]"):
            count -= 1  # a number may go on, and other white space than before may follow
        return count


class Cut(msgspec.Struct, frozen=True, gc=False):
    """A body without the elements that an earlier one has."""

    rest: bytes
    """The body, in which :data:`_MARK` stands for these elements."""
    count: int
    """Number of the elements."""
    start: int
    """Index of the array's first byte in the whole body."""
    history: History
    """The earlier body's array."""


def array_start(body: bytes, key: bytes) -> int:
    """Return the index after the opening bracket of the first array of that key, or -1.

    The array may stand at any depth.
    """
    for opening in (b'"%b":[' % key, b'"%b": [' % key):
        if (at := body.find(opening)) >= 0:
            return at + len(opening)
    return -1


def cut(body: bytes, key: bytes, known: Sequence[History]) -> Cut | None:
    """Return the body without the elements that it shares with one of the ``known`` histories.

    Return ``None`` if it shares too little.
    """
    if len(body) < SHORTEST or not known:
        return None
    start = array_start(body, key)
    if start < 0:
        return None
    best, most = known[0], 0
    for history in known:
        count = history.shared(body, start)
        if count > most:
            best, most = history, count
        if 2 * count > len(history.ends):
            break
    if not most:
        return None
    end = start + best.ends[most - 1] - best.start
    if body[end : end + 1] == b"]":  # a request that is sent again: its last message is read again
        if most == 1:
            return None
        most -= 1
        end = start + best.ends[most - 1] - best.start
    return Cut(b"".join((body[:start], _MARK, body[end:])), most, start, best)


def is_marked(fields: dict[str, Any], key: str) -> bool:
    """Return True, and remove the mark, if the array of that key begins with it."""
    array = fields.get(key)
    if not isinstance(array, list) or not array or array[0] != _MARKED:
        return False
    del array[0]
    return True


def element_ends(body: bytes, key: str, start: int) -> tuple[int, ...]:
    """Return the index after each element of the array of that key, which begins at ``start``.

    Return an empty tuple if another array begins there.
    """
    array = bytes(_FIELDS.decode(body)[key])
    if not body.startswith(array, start - 1):
        return ()
    ends: list[int] = []
    at = start
    for element in _ELEMENTS.decode(array):
        at = body.index(element, at) + len(memoryview(element))
        ends.append(at)
    return tuple(ends)


def extended(body: bytes, key: str, found: Cut | None) -> History | None:
    """Return the history of ``body``, still without its messages; ``found`` is its cut.

    Return ``None`` for a body that is not worth remembering.
    """
    if len(body) < SHORTEST:
        return None
    if found is None:
        start = array_start(body, key.encode())
        ends = element_ends(body, key, start) if start >= 0 else ()
        return History(body, start, ends) if ends else None
    marked = element_ends(found.rest, key, found.start)[1:]
    moved = found.start - found.history.start
    repeated = found.history.ends[: found.count]
    if moved:
        repeated = tuple([end + moved for end in repeated])
    added = len(body) - len(found.rest)
    return History(body, found.start, (*repeated, *[end + added for end in marked]))
