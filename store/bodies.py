"""Request and response bodies: content-addressed, each stored as what it adds to an earlier one.

A harness sends its whole history with every call. A body is therefore kept as a splice of a *base*
body: ``base[:prefix] + middle + base[len(base) - suffix:]``, and only the middle is stored, with
the part of the base that it replaces as zstd's dictionary when that is worth it (a harness may
change a line at the top and repeat the rest). The identifier is the SHA-256 of the whole body, so
reading proves itself. Bases form chains; reading one is a splice per link, linear in the chain.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

import numpy as np
import zstandard

from store.packing import DICTIONARY, LEVEL, pack, pack_against, unpack, unpack_against
from store.tree import common_prefix

MAX_DEPTH: Final = 1000
"""A chain this long is ended by a body stored whole, so that no read follows more links."""

_DICTIONARY_WORTH: Final = 256
"""Fewer replaced bytes than this help compression less than the dictionary costs."""

_WINDOW: Final = 1 << 12

_ADDITION_REACH: Final = 1 << 17

_WRAPPING_REACH: Final = 1 << 18
"""Longer replies have no need of a dictionary: they repeat themselves."""


@dataclass(frozen=True, slots=True)
class Body:
    """A body that later ones can be stored against."""

    id: str
    data: bytes
    depth: int
    """Links from here to a body that is stored whole; 0 for that one."""


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

    def contains(self, base: Body) -> bool:
        """Whether nearly all of ``base`` is part of this body."""
        return self.base_id == base.id and self.prefix + self.suffix >= 0.9 * len(base.data)

    @property
    def addition(self) -> bytes:
        """What this row adds to its base, when it can be read without it and is not too long to
        serve as a dictionary; else nothing."""
        if self.data[0] == DICTIONARY or len(self.data) > _ADDITION_REACH:
            return b""
        return unpack(self.data)


def body_id(data: bytes) -> str:
    """SHA-256 hex of the whole body."""
    return sha256(data).hexdigest()


def encode(data: bytes, base: Body | None = None, identifier: str | None = None) -> BodyRow:
    """``data`` as a row: against ``base`` when that saves bytes, else whole."""
    identifier = identifier or body_id(data)
    if base is not None and base.id != identifier and base.depth < MAX_DEPTH:
        prefix, suffix = shared_ends(base.data, data)
        replaced = base.data[prefix : len(base.data) - suffix]
        middle = data[prefix : len(data) - suffix]
        worth_dictionary = len(replaced) >= _DICTIONARY_WORTH and len(middle) >= _DICTIONARY_WORTH
        if prefix + suffix >= _DICTIONARY_WORTH or worth_dictionary:
            packed = pack_against(middle, replaced) if worth_dictionary else pack(middle)
            return BodyRow(identifier, base.id, prefix, suffix, len(data), base.depth + 1, packed)
    return BodyRow(identifier, None, 0, 0, len(data), 0, pack(data))


class Wrappings:
    """Stores replies against an earlier whole one, which serves as zstd's dictionary.

    Replies share no beginning (their identifiers differ) but all their wrapping: event names, field
    names, the model's name. A prepared dictionary serves every later reply of a session, each of
    them one link away from the base. Prepared it takes many times its size, so that only the
    latest used are kept.
    """

    def __init__(self, kept: int = 64) -> None:
        self._kept = kept
        self._prepared: OrderedDict[str, zstandard.ZstdCompressor] = OrderedDict()

    def encode(self, base: Body, data: bytes, identifier: str) -> BodyRow:
        """``data`` as a row: against the base when that halves it, else whole."""
        if max(len(data), len(base.data)) <= _WRAPPING_REACH and identifier != base.id:
            packed = bytes((DICTIONARY,)) + self._compressor(base).compress(data)
            if 2 * len(packed) <= len(data):
                return BodyRow(identifier, base.id, 0, 0, len(data), base.depth + 1, packed)
        return BodyRow(identifier, None, 0, 0, len(data), 0, pack(data))

    def _compressor(self, base: Body) -> zstandard.ZstdCompressor:
        found = self._prepared.pop(base.id, None)
        if found is None:
            dictionary = zstandard.ZstdCompressionDict(
                base.data, dict_type=zstandard.DICT_TYPE_RAWCONTENT
            )
            dictionary.precompute_compress(level=LEVEL)
            found = zstandard.ZstdCompressor(level=LEVEL, dict_data=dictionary)
        self._prepared[base.id] = found
        if len(self._prepared) > self._kept:
            self._prepared.popitem(last=False)
        return found


def decode(chain: Sequence[BodyRow]) -> bytes:
    """The body of the last row; ``chain`` starts with a whole one, each row's base before it.

    Raises ``ValueError`` when a link is missing or the bytes are not those of the identifier.
    """
    buffer = bytearray()
    previous: str | None = None
    for row in chain:
        if row.base_id != previous:
            raise ValueError(f"body {row.id} needs base {row.base_id}, found {previous}")
        end = len(buffer) - row.suffix
        buffer[row.prefix : end] = unpack_against(row.data, bytes(buffer[row.prefix : end]))
        previous = row.id
    data = bytes(buffer)
    if previous is None or body_id(data) != previous:
        raise ValueError(f"body {previous} does not have the bytes it was stored with")
    return data


def shared_ends(left: bytes, right: bytes) -> tuple[int, int]:
    """Lengths of the common prefix and of the common suffix after it; they never overlap."""
    prefix = _common(left, right, lambda data, at, to: data[at:to])
    room = min(len(left), len(right)) - prefix
    suffix = _common(left, right, lambda data, at, to: data[len(data) - to : len(data) - at][::-1])
    return prefix, min(suffix, room)


def _common(left: bytes, right: bytes, piece: Callable[[bytes, int, int], bytes]) -> int:
    """Compares in windows that double, so that an early difference is found early."""
    limit, at, window = min(len(left), len(right)), 0, _WINDOW
    while at < limit:
        to = min(at + window, limit)
        first, second = piece(left, at, to), piece(right, at, to)
        if first != second:
            return at + common_prefix(
                np.frombuffer(first, dtype=np.uint8), np.frombuffer(second, dtype=np.uint8)
            )
        at, window = to, window * 2
    return limit
