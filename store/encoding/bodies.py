"""Request and response bodies: exact to the byte, each stored as what it adds to an earlier one.

A harness sends its whole history with every call. A request is therefore kept as a splice of the
request it goes on from: ``base[:prefix] + middle + base[len(base) - suffix:]``, and only the middle
is stored (``store/encoding/texts.py``), with the part of the base that it replaces as zstd's
dictionary when that pays (a harness may change a line at the top and repeat the rest). Bases form
chains; reading one is a splice per link, linear in the chain. What shares little with the request
before it begins a chain: it is stored whole in ``bodies``, named by its SHA-256, once for all
sessions that send it. Whatever a body is stored as, its SHA-256 is kept with the call, so that
reading proves itself.

Until 0004 every body was a row of ``bodies``, against any other as its base; such rows are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

import msgspec

from bridle.store.encoding.packing import DICTIONARY, RAW, pack, pack_against, unpack_against

MAX_DEPTH: Final = 1000
"""A chain this long is ended by a body stored whole, so that no read follows more links."""

_DICTIONARY_WORTH: Final = 256
"""Fewer replaced bytes than this help compression less than the dictionary costs."""

_DICTIONARY_GAIN: Final = 4
"""So many times smaller the replaced bytes must make what replaces them: else the text of the
call's tokens serves it better."""

_WINDOW: Final = 1 << 12
_WINDOW_AT_END: Final = 1 << 7
"""Bodies that go on share most of themselves, and mostly a few brackets after that."""


class Body(msgspec.Struct, frozen=True, gc=False):
    """A request that later ones can be stored against."""

    id: str
    data: bytes
    depth: int
    """Links from here to a body that is stored whole; 0 for that one."""


class Splice(msgspec.Struct, frozen=True, gc=False):
    """A body as the difference to its base."""

    prefix: int
    suffix: int
    data: bytes
    """The middle behind a codec byte: as it is, or packed against what it replaces."""

    def apply(self, base: bytes) -> bytes:
        """The body."""
        end = len(base) - self.suffix
        middle = unpack_against(self.data, base[self.prefix : end])
        return b"".join((base[: self.prefix], middle, base[end:]))

    def contains(self, base: bytes) -> bool:
        """Whether nearly all of ``base`` is part of the body."""
        return self.prefix + self.suffix >= 0.9 * len(base)


@dataclass(frozen=True, slots=True)
class BodyRow:
    """A row of the ``bodies`` table."""

    id: str
    base_id: str | None
    prefix: int
    suffix: int
    size: int
    depth: int
    data: bytes


def body_id(data: bytes) -> str:
    """SHA-256 hex of the whole body."""
    return sha256(data).hexdigest()


def whole(data: bytes, identifier: str | None = None) -> BodyRow:
    """``data`` as a row that needs no other."""
    return BodyRow(identifier or body_id(data), None, 0, 0, len(data), 0, pack(data))


def splice(data: bytes, base: Body) -> Splice | None:
    """``data`` against ``base``; ``None`` when they share too little, or the chain is too long."""
    if base.depth >= MAX_DEPTH:
        return None
    prefix, suffix = shared_ends(base.data, data)
    replaced = base.data[prefix : len(base.data) - suffix]
    middle = data[prefix : len(data) - suffix]
    if min(len(replaced), len(middle)) >= _DICTIONARY_WORTH:
        packed = pack_against(middle, replaced)
        if packed[0] == DICTIONARY and _DICTIONARY_GAIN * len(packed) <= len(middle):
            return Splice(prefix, suffix, packed)
    if 2 * (prefix + suffix) >= len(data):
        return Splice(prefix, suffix, bytes((RAW,)) + middle)
    return None


def decode(chain: Sequence[BodyRow]) -> bytes:
    """The body of the last row; ``chain`` starts with a whole one, each row's base before it.

    Raises ``ValueError`` when a link is missing or the bytes are not those of the identifier.
    """
    data = b""
    previous: str | None = None
    for row in chain:
        if row.base_id != previous:
            raise ValueError(f"body {row.id} needs base {row.base_id}, found {previous}")
        data = Splice(row.prefix, row.suffix, row.data).apply(data)
        previous = row.id
    return proved(data, previous)


def proved(data: bytes, identifier: str | None) -> bytes:
    """``data``. Raises ``ValueError`` when it is not what the identifier names."""
    if identifier is None or body_id(data) != identifier:
        raise ValueError(f"body {identifier} does not have the bytes it was stored with")
    return data


def shared_ends(left: bytes, right: bytes) -> tuple[int, int]:
    """Lengths of the common prefix and of the common suffix after it; they never overlap."""
    prefix = _common(left, right, lambda data, at, to: data[at:to], _WINDOW)
    room = min(len(left), len(right)) - prefix
    suffix = _common(left, right, _from_end, _WINDOW_AT_END)
    return prefix, min(suffix, room)


def _from_end(data: bytes, at: int, to: int) -> bytes:
    return data[len(data) - to : len(data) - at][::-1]


def _common(
    left: bytes, right: bytes, piece: Callable[[bytes, int, int], bytes], window: int
) -> int:
    """Compares in windows that double, so that an early difference is found early."""
    limit, at = min(len(left), len(right)), 0
    while at < limit:
        to = min(at + window, limit)
        first, second = piece(left, at, to), piece(right, at, to)
        if first != second:
            return at + _first_difference(first, second)
        at, window = to, window * 2
    return limit


def _first_difference(left: bytes, right: bytes) -> int:
    """Where two pieces of one length differ first, by halves."""
    same, end = 0, len(left)
    while end - same > 1:
        middle = (same + end) // 2
        if left[same:middle] == right[same:middle]:
            same = middle
        else:
            end = middle
    return same
