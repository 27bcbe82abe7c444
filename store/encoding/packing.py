"""Arrays and JSON as bytes: exact to the bit, and compressed only where that is smaller.

The first byte of a packed value names its codec, so that every codec can read what another wrote.
Of logprobs the bytes with their exponents are compressed, which are nearly constant, and their
mantissas, which are noise, are left alone; token ids are cut into their low halves and their high
ones, which leaves words that return as a whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import orjson
import zstandard
from numpy.typing import ArrayLike

from bridle.store.records import Logprobs, TokenIds

RAW: Final = 0
ZSTD: Final = 1
PLANES: Final = 2
DICTIONARY: Final = 3
"""zstd with a dictionary that the reader must have."""
HALVES: Final = 4
EXPONENTS: Final = 5
"""A zstd frame of every value's highest byte, then the planes of the other three; ``PLANES``, all
four planes in one frame, was written until 0004."""

LEVEL: Final = 1
"""Level 3 takes a third more time to save a hundredth of the bytes."""
_WORTH_TRYING: Final = 48
"""Below this many bytes a zstd frame costs more than it saves."""

_SMALL_BITS: Final = 12
"""Lengths of so many bits are below 4 KB."""

_KEPT: Final = 64
"""Compressors with their dictionaries, 50 to 100 KB each: making one asks the processor what it can
do, which a virtual machine answers slowly, and takes ten times as long as compressing a little."""


def _raw_dictionary(content: bytes) -> zstandard.ZstdCompressionDict:
    return zstandard.ZstdCompressionDict(content, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def _compressor(dictionary: bytes, data_bits: int) -> zstandard.ZstdCompressor:
    """For data of so many bits' length."""
    return zstandard.ZstdCompressor(
        dict_data=_raw_dictionary(dictionary),
        compression_params=_parameters(data_bits, len(dictionary).bit_length()),
    )


@lru_cache(maxsize=256)
def _parameters(data_bits: int, dictionary_bits: int) -> zstandard.ZstdCompressionParameters:
    """For sizes below these powers of two."""
    bits = max(data_bits, dictionary_bits)
    # zstd's own tables for so little have four places for each of its bytes.
    tables = {"hash_log": max(6, bits)} if bits <= _SMALL_BITS else {}
    return zstandard.ZstdCompressionParameters.from_level(
        LEVEL,
        source_size=1 << data_bits,
        dict_size=1 << dictionary_bits,
        window_log=min(27, max(10, 1 + bits)),
        # Another dictionary than this one could give other bytes, and be believed.
        write_checksum=True,
        **tables,
    )


class _Codecs(threading.local):
    """zstandard's objects are fast to reuse and may not be shared between threads."""

    def __init__(self) -> None:
        self.compress = zstandard.ZstdCompressor(
            level=LEVEL, write_checksum=False, write_content_size=True
        ).compress
        self.prove = zstandard.ZstdCompressor(
            level=LEVEL, write_checksum=True, write_content_size=True
        ).compress
        self.decompress = zstandard.ZstdDecompressor().decompress
        self.kept = lru_cache(_KEPT)(_compressor)


_codecs = _Codecs()


def pack(data: bytes) -> bytes:
    """``data`` behind a codec byte, compressed when that is smaller."""
    if len(data) >= _WORTH_TRYING:
        packed = _codecs.compress(data)
        if len(packed) < len(data):
            return bytes((ZSTD,)) + packed
    return bytes((RAW,)) + data


def pack_proved(data: bytes) -> bytes:
    """``data`` in a frame with a checksum of its own, for what has none elsewhere."""
    return bytes((ZSTD,)) + _codecs.prove(data)


def unpack(packed: bytes) -> bytes:
    """What :func:`pack` or :func:`pack_proved` was given. Raises ``ValueError`` on an unknown codec
    and on damaged bytes."""
    codec = packed[0]
    if codec == RAW:
        return bytes(packed[1:])
    if codec == ZSTD:
        return _decompress(packed[1:])
    raise ValueError(f"packed value has unknown codec {codec}")


def _decompress(frame: bytes) -> bytes:
    try:
        return _codecs.decompress(frame)
    except zstandard.ZstdError as error:
        raise ValueError(f"a packed value is damaged: {error}") from error


def pack_ids(ids: ArrayLike) -> bytes:
    """Token ids ``uint32[T]`` as bytes. Raises ``OverflowError`` for ids outside ``uint32``."""
    words = np.ascontiguousarray(ids, dtype="<u4")
    raw = words.tobytes()
    if len(raw) >= _WORTH_TRYING:
        halves = words.view("<u2").reshape(-1, 2)
        packed = _codecs.compress(halves.T.tobytes())
        if len(packed) < len(raw):
            return bytes((HALVES,)) + packed
    return bytes((RAW,)) + raw


def unpack_ids(packed: bytes) -> TokenIds:
    """``uint32[T]``, read-only. Raises ``ValueError`` on damaged bytes."""
    if packed[0] != HALVES:
        return np.frombuffer(unpack(packed), dtype="<u4")
    raw = _decompress(packed[1:])
    half = len(raw) // 2
    ids = np.frombuffer(raw, dtype="<u2", count=half // 2).astype("<u4")
    high = raw[half:]
    if high != bytes(half):
        ids |= np.frombuffer(high, dtype="<u2").astype("<u4") << 16
    ids.flags.writeable = False
    return ids


def pack_logprobs(logprobs: ArrayLike) -> bytes:
    """Logprobs ``float32[T]`` as bytes, NaN payloads and the sign of zero included."""
    words = np.ascontiguousarray(logprobs, dtype="<f4")
    if words.nbytes >= _WORTH_TRYING:
        planes = words.view(np.uint8).reshape(-1, 4).T.tobytes()
        mantissas = 3 * len(words)
        exponents = _codecs.compress(planes[mantissas:])
        if len(exponents) < len(words):
            return b"".join((bytes((EXPONENTS,)), exponents, planes[:mantissas]))
    return bytes((RAW,)) + words.tobytes()


def unpack_logprobs(packed: bytes) -> Logprobs:
    """``float32[T]``, read-only. Raises ``ValueError`` on damaged bytes."""
    codec = packed[0]
    if codec == EXPONENTS:
        exponents = _decompress(packed[1:])  # what comes after the frame is left alone
        planes = packed[-3 * len(exponents) :] + exponents
    elif codec == PLANES:
        planes = _decompress(packed[1:])
    else:
        return np.frombuffer(unpack(packed), dtype="<f4")
    words = np.frombuffer(planes, dtype=np.uint8).reshape(4, -1).T.tobytes()
    return np.frombuffer(words, dtype="<f4")


def pack_against(
    data: bytes,
    dictionary: bytes,
    or_else: Callable[[bytes], bytes] = pack,
    *,
    returns: bool = False,
) -> bytes:
    """``data`` compressed with the bytes of ``dictionary`` at hand; without them, by ``or_else``,
    when that is smaller. ``returns``: the same dictionary will be given again soon."""
    bits = len(data).bit_length()
    compressor = _codecs.kept if returns and bits <= _SMALL_BITS else _compressor
    packed = bytes((DICTIONARY,)) + compressor(dictionary, bits).compress(data)
    if 2 * len(packed) <= len(data):
        return packed
    plain = or_else(data)
    return packed if len(packed) < len(plain) else plain


def unpack_against(packed: bytes, dictionary: bytes) -> bytes:
    """What :func:`pack_against` was given. Raises ``ValueError`` when that does not come out."""
    if packed[0] != DICTIONARY:
        return unpack(packed)
    decompressor = zstandard.ZstdDecompressor(dict_data=_raw_dictionary(dictionary))
    try:
        return decompressor.decompress(packed[1:])
    except zstandard.ZstdError as error:
        raise ValueError(f"a packed value is damaged: {error}") from error


def dump_json(value: Any) -> bytes:
    """Compact JSON; mappings that are not dicts are written as objects."""
    return orjson.dumps(value, default=_plain)


def checksum(*parts: bytes) -> bytes:
    """8 bytes that change when any part, or the border between two parts, changes."""
    sized = [piece for part in parts for piece in (len(part).to_bytes(8, "little"), part)]
    return blake2b(b"".join(sized), digest_size=8).digest()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (frozenset, set)):
        return sorted(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no JSON form")
