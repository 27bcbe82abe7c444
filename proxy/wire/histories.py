"""The array of messages of a client's body, read on from where an earlier body ended.

The elements of the array whose bytes are those of the earlier body are cut out, and only the rest
is decoded and converted: a dialect reads on from a checkpoint, which has its conversation as it was
after these elements. The bytes are compared, so that no two histories are ever taken for each
other. The cut leaves a mark as the first element. If the mark is not the first element of the
body's own array after decoding, the cut was made elsewhere, and the body is decoded whole.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, Self, TypeVar, cast

import msgspec

from bridle.proxy.wire.canonical import Request
from bridle.store.encoding.bodies import common_bytes

E = TypeVar("E")
S = TypeVar("S", bound="State")

SHORTEST: Final = 16_384
"""Bytes of a body below which it costs less to decode than to remember."""
_REWRITTEN: Final = 8
"""Number of elements at the end of an array that the next body may have in another form."""
_CHECKPOINTS: Final = 4
"""Number of checkpoints that are kept of a body."""
_MARKED: Final = {"cut": secrets.token_hex(16)}
"""The element that stands for those that are cut out. No client knows it."""
_MARK: Final = msgspec.json.encode(_MARKED)
_ELEMENTS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_BETWEEN: Final = b", \t\r\n"
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class State(Protocol):
    """A conversation as a dialect reads it, up to some element of the array."""

    def fork(self) -> Self:
        """Return a copy that goes on by itself."""
        ...


class Checkpoint(NamedTuple):
    """The conversation after the first ``elements`` elements. Nobody may change its state."""

    elements: int
    state: State


class Reading:
    """One reading of the array of a body, from its beginning or on from a checkpoint."""

    def __init__(self, before: Sequence[Checkpoint] = ()) -> None:
        """Read on from the last of the checkpoints of an earlier body."""
        self.checkpoints: list[Checkpoint] = [*before]
        """The checkpoints from which a later body may be read on, the last at the array's end."""
        self.lasting = True
        """False if the elements alone do not decide how later ones are read."""

    def over(
        self, elements: Sequence[E], fresh: S, add: Callable[[S, Sequence[E], int], None]
    ) -> S:
        """Return the conversation of all elements, of which ``elements`` are those in the body.

        ``fresh`` is a conversation without any. ``add`` adds elements to a conversation and gets
        the index of the first of them in the whole array.
        """
        at, state = 0, fresh
        if self.checkpoints:
            before = self.checkpoints[-1]
            at, state = before.elements, cast(S, before.state.fork())
        if (early := max(0, len(elements) - _REWRITTEN)) > 0:
            add(state, elements[:early], at)
            self.checkpoints.append(Checkpoint(at + early, state.fork()))
        add(state, elements[early:], at + early)
        self.checkpoints.append(Checkpoint(at + len(elements), state.fork()))
        del self.checkpoints[:-_CHECKPOINTS]
        return state


class History(msgspec.Struct, frozen=True, gc=False):
    """The array of messages in one body."""

    body: bytes
    start: int
    """Index of the first byte after the array's opening bracket."""
    ends: tuple[int, ...]
    """The index after each element of the array."""
    checkpoints: tuple[Checkpoint, ...] = ()

    def shared(self, body: bytes, start: int, repeats: Repeats | None) -> tuple[int, int]:
        """Compare with the array at ``start`` of ``body``.

        Return the numbers of leading elements and of leading bytes that both have.
        """
        if not self.ends:
            return 0, 0
        same = 0
        if repeats is not None and repeats.earlier is self.body and start == self.start:
            same = max(0, repeats.length - start)
        same += common_bytes(self.body, body, self.start + same, start + same)
        count = bisect_right(self.ends, self.start + same)
        moved = start - self.start
        while count and body[(end := self.ends[count - 1] + moved) : end + 1] not in (b",", b"]"):
            count -= 1  # a number may go on, and other white space than before may follow
        return count, same


class Repeats(NamedTuple):
    """The beginning of a body that an earlier body has, too."""

    earlier: bytes
    length: int
    """Number of bytes that both begin with."""


class Arriving:
    """A body while it arrives. What it repeats of an earlier body is compared and not kept."""

    def __init__(self, earlier: Sequence[bytes]) -> None:
        """``earlier`` are the bodies that it may repeat, the most likely first."""
        self._earlier = earlier
        self._repeated: bytes | None = None
        self._count = 0
        self._pieces: list[bytes] = []

    def add(self, piece: bytes) -> None:
        """Add the bytes that follow those which have come."""
        if self._pieces:
            self._pieces.append(piece)
            return
        if not self._count:
            self._repeated = next((one for one in self._earlier if one.startswith(piece)), None)
        if self._repeated is None:
            self._pieces.append(piece)
            return
        if self._repeated.startswith(piece, self._count):
            self._count += len(piece)
            return
        same = common_bytes(self._repeated, piece, self._count)
        self._count += same
        self._pieces.append(piece[same:])

    def body(self) -> tuple[bytes, Repeats | None]:
        """Return the whole body, and what it repeats."""
        if self._repeated is None or not self._count:
            return b"".join(self._pieces), None
        start = memoryview(self._repeated)[: self._count]
        return b"".join((start, *self._pieces)), Repeats(self._repeated, self._count)


class Parsed(NamedTuple):
    """A request that was read from a body, and what later bodies and the record may use of it."""

    request: Request
    history: History | None = None
    """``None`` if the body is not worth remembering."""
    repeats: Repeats | None = None


class Known(NamedTuple):
    """The earlier bodies of a client, as far as they are known."""

    histories: Sequence[History] = ()
    """The histories that a body may go on from, the latest first."""
    repeats: Repeats | None = None
    """The bytes that the body is known to repeat."""


ParseOn = Callable[[bytes, Mapping[str, str], Mapping[str, str], Known], Parsed]
"""A function like :data:`bridle.proxy.wire.canonical.Parse`, with what is known of earlier
bodies."""


class Cut(msgspec.Struct, frozen=True, gc=False):
    """A body without the elements that an earlier one has."""

    rest: bytes
    """The body, in which :data:`_MARK` stands for these elements."""
    start: int
    """Index of the array's first byte in the whole body."""
    history: History
    """The earlier body's array."""
    before: tuple[Checkpoint, ...]
    """The checkpoints of the earlier body; at the last of them, this one is read on."""
    same: int
    """Number of the array's leading bytes that both have."""

    @property
    def count(self) -> int:
        """Number of the elements that are cut out."""
        return self.before[-1].elements

    def repeats(self, body: bytes) -> Repeats | None:
        """Return what the whole body repeats of the earlier one."""
        earlier, start = self.history.body, self.start
        if start != self.history.start or not body.startswith(memoryview(earlier)[:start]):
            return None
        return Repeats(earlier, start + self.same)


def array_start(body: bytes, key: bytes) -> int:
    """Return the index after the opening bracket of the first array of that key, or -1.

    The array may stand at any depth.
    """
    for opening in (b'"%b":[' % key, b'"%b": [' % key):
        if (at := body.find(opening)) >= 0:
            return at + len(opening)
    return -1


def cut(body: bytes, key: str, known: Known) -> Cut | None:
    """Return the body without the elements that it shares with one of the ``known`` histories.

    Return ``None`` if it shares too little.
    """
    if len(body) < SHORTEST or not known.histories:
        return None
    start = array_start(body, key.encode())
    if start < 0:
        return None
    best, most, same = known.histories[0], 0, 0
    for history in known.histories:
        count, alike = history.shared(body, start, known.repeats)
        if count > most:
            best, most, same = history, count, alike
        if 2 * count > len(history.ends):
            break
    for last in range(len(best.checkpoints), 0, -1):
        before = best.checkpoints[:last]
        if not 0 < before[-1].elements <= most:
            continue
        end = start + best.ends[before[-1].elements - 1] - best.start
        if body.startswith(b",", end):  # at least one element is read
            rest = b"".join((body[:start], _MARK, body[end:]))
            return Cut(rest, start, best, before, same)
    return None


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
    array = bytes(_FIELDS.decode(body).get(key, b""))
    if not array or not body.startswith(array, start - 1):
        return ()
    ends: list[int] = []
    at = start
    for element in _ELEMENTS.decode(array):
        # Only a comma and white space stand between elements: no need to search for the next one.
        while body[at] in _BETWEEN:
            at += 1
        at += len(memoryview(element))
        ends.append(at)
    return tuple(ends)


def extended(body: bytes, key: str, found: Cut | None, reading: Reading) -> History | None:
    """Return the history of ``body``, of which ``found`` is the cut and ``reading`` the reading.

    Return ``None`` for a body that is not worth remembering.
    """
    if len(body) < SHORTEST or not reading.lasting:
        return None
    if found is None:
        start = array_start(body, key.encode())
        ends = element_ends(body, key, start) if start >= 0 else ()
    else:
        start, added = found.start, len(body) - len(found.rest)
        new = [end + added for end in element_ends(found.rest, key, start)[1:]]
        repeated = found.history.ends[: found.count]
        if moved := start - found.history.start:
            repeated = tuple([end + moved for end in repeated])
        ends = (*repeated, *new)
    if not ends or not reading.checkpoints or reading.checkpoints[-1].elements != len(ends):
        return None
    return History(body, start, ends, tuple(reading.checkpoints))
