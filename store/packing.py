"""Arrays and JSON as bytes: exact to the bit, and compressed only where that is smaller.

The first byte of a packed value names its codec, so that every codec can read what another wrote.
Four-byte words are cut into byte planes before compression: the high bytes of token ids and the
exponents of logprobs are nearly constant, and lie side by side that way.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final, cast

import numpy as np
import orjson
import zstandard
from numpy.typing import ArrayLike, NDArray

from store.records import Logprobs, TokenIds

RAW: Final = 0
ZSTD: Final = 1
PLANES: Final = 2
DICTIONARY: Final = 3
"""zstd with a dictionary that the reader must have (``store/bodies.py``)."""

LEVEL: Final = 1
"""Level 3 takes a third more time to save a hundredth of the bytes."""
_WORTH_TRYING: Final = 48
"""Below this many bytes a zstd frame costs more than it saves."""

_MANY_LOGPROBS: Final = 1024
"""Bytes of logprobs below which their mantissas hide what little their exponents would save."""


class _Codecs(threading.local):
    """zstandard's objects are fast to reuse and may not be shared between threads."""

    def __init__(self) -> None:
        self.compress = zstandard.ZstdCompressor(
            level=LEVEL, write_checksum=False, write_content_size=True
        ).compress
        self.decompress = zstandard.ZstdDecompressor().decompress


_codecs = _Codecs()


def pack(data: bytes) -> bytes:
    """``data`` behind a codec byte, compressed when that is smaller."""
    if len(data) >= _WORTH_TRYING:
        packed = _codecs.compress(data)
        if len(packed) < len(data):
            return bytes((ZSTD,)) + packed
    return bytes((RAW,)) + data


def unpack(packed: bytes) -> bytes:
    """What :func:`pack` was given. Raises ``ValueError`` on an unknown codec."""
    codec = packed[0]
    if codec == RAW:
        return bytes(packed[1:])
    if codec == ZSTD:
        return _codecs.decompress(packed[1:])
    raise ValueError(f"packed value has unknown codec {codec}")


def pack_ids(ids: ArrayLike) -> bytes:
    """Token ids ``uint32[T]`` as bytes. Raises ``OverflowError`` for ids outside ``uint32``."""
    return _pack_words(np.ascontiguousarray(ids, dtype="<u4"), _WORTH_TRYING)


def unpack_ids(packed: bytes) -> TokenIds:
    """``uint32[T]``, read-only."""
    return np.frombuffer(_unpack_words(packed), dtype="<u4")


def pack_logprobs(logprobs: ArrayLike) -> bytes:
    """Logprobs ``float32[T]`` as bytes, NaN payloads and the sign of zero included."""
    return _pack_words(np.ascontiguousarray(logprobs, dtype="<f4"), _MANY_LOGPROBS)


def unpack_logprobs(packed: bytes) -> Logprobs:
    """``float32[T]``, read-only."""
    return np.frombuffer(_unpack_words(packed), dtype="<f4")


def pack_json(value: Mapping[str, Any]) -> bytes:
    """A JSON object as bytes. Raises ``TypeError`` for what JSON cannot say."""
    return pack(dump_json(value))


def unpack_json(packed: bytes) -> dict[str, Any]:
    return cast(dict[str, Any], orjson.loads(unpack(packed)))


def dump_json(value: Any) -> bytes:
    """Compact JSON; mappings that are not dicts are written as objects."""
    return orjson.dumps(value, default=_plain)


def checksum(*parts: bytes) -> bytes:
    """8 bytes that change when any part, or the border between two parts, changes."""
    digest = blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _pack_words(words: NDArray[Any], least: int) -> bytes:
    raw = words.tobytes()
    if len(raw) >= least:
        planes = words.view(np.uint8).reshape(-1, 4).T.tobytes()
        packed = _codecs.compress(planes)
        if len(packed) < len(raw):
            return bytes((PLANES,)) + packed
    return bytes((RAW,)) + raw


def _unpack_words(packed: bytes) -> bytes:
    if packed[0] != PLANES:
        return unpack(packed)
    planes = np.frombuffer(_codecs.decompress(packed[1:]), dtype=np.uint8)
    return planes.reshape(4, -1).T.tobytes()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (frozenset, set)):
        return sorted(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no JSON form")
