"""Arrays and JSON as bytes: exact to the bit, and compressed only where that is smaller.

The first byte of a packed value names its codec. Of logprobs only the bytes with the exponents,
which are nearly constant, are compressed; the mantissas, which are noise, are stored as they are.
Token ids are split into their low halves and their high ones, because whole words repeat in each.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import numpy as np
import orjson
import zstandard
from numpy.typing import ArrayLike

from bridle.store.records import KeptTokens, Logprobs, RoutedExperts, TokenIds

RAW: Final = 0
ZSTD: Final = 1
DICTIONARY: Final = 2
"""zstd with a dictionary that the reader must have, as for every codec from this one on in a packed
body."""
HALVES: Final = 3
EXPONENTS: Final = 4
"""A zstd frame of every value's highest byte, followed by the planes of the other three bytes."""

LEVEL: Final = 1
"""The zstd level. Level 3 takes a third more time to save a hundredth of the bytes."""
_WORTH_TRYING: Final = 48
"""The minimum bytes to compress: below, a zstd frame costs more than it saves."""

_SMALL_BITS: Final = 12
"""The number of bits of a length below 4 KB."""


class _Codecs(threading.local):
    """The codecs of a thread.

    The objects of zstandard are fast to reuse and must not be shared between threads.
    """

    def __init__(self) -> None:
        self.compress = zstandard.ZstdCompressor(
            level=LEVEL, write_checksum=False, write_content_size=True
        ).compress
        self.decompress = zstandard.ZstdDecompressor().decompress


_codecs = _Codecs()


def pack(data: bytes) -> bytes:
    """Return ``data`` behind a codec byte, compressed if that is smaller."""
    if len(data) >= _WORTH_TRYING:
        packed = _codecs.compress(data)
        if len(packed) < len(data):
            return bytes((ZSTD,)) + packed
    return bytes((RAW,)) + data


def unpack(packed: bytes) -> bytes:
    """Return the bytes that :func:`pack` was given.

    Raise ``ValueError`` for an unknown codec and for damaged bytes.
    """
    codec = packed[0]
    if codec == RAW:
        return bytes(packed[1:])
    if codec == ZSTD:
        return _decompress(packed[1:])
    raise ValueError(f"packed value has unknown codec {codec}")


def pack_against(data: bytes, dictionary: bytes, codec: int = DICTIONARY) -> bytes:
    """Return ``data``, compressed with the bytes of ``dictionary``, behind ``codec``.

    If :func:`pack` gives fewer bytes, return these.
    """
    if len(data) < _WORTH_TRYING or not dictionary:
        return pack(data)
    compressor = zstandard.ZstdCompressor(
        dict_data=zstandard.ZstdCompressionDict(
            dictionary, dict_type=zstandard.DICT_TYPE_RAWCONTENT
        ),
        compression_params=_parameters(len(data).bit_length(), len(dictionary).bit_length()),
    )
    packed = bytes((codec,)) + compressor.compress(data)
    if 2 * len(packed) <= len(data):
        return packed
    plain = pack(data)
    return packed if len(packed) < len(plain) else plain


def unpack_against(packed: bytes, dictionary: bytes) -> bytes:
    """Return the bytes that :func:`pack_against` was given.

    Raise ``ValueError`` for damaged bytes, and for another dictionary.
    """
    if packed[0] < DICTIONARY:
        return unpack(packed)
    content = zstandard.ZstdCompressionDict(dictionary, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    try:
        return zstandard.ZstdDecompressor(dict_data=content).decompress(packed[1:])
    except zstandard.ZstdError as error:
        raise ValueError(f"a packed value is damaged: {error}") from error


@lru_cache(maxsize=256)
def _parameters(data_bits: int, dictionary_bits: int) -> zstandard.ZstdCompressionParameters:
    """Return zstd's parameters for data and a dictionary of these lengths.

    The arguments are the numbers of bits of the lengths.
    """
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


def _decompress(frame: bytes) -> bytes:
    try:
        return _codecs.decompress(frame)
    except zstandard.ZstdError as error:
        raise ValueError(f"a packed value is damaged: {error}") from error


def pack_ids(ids: ArrayLike) -> bytes:
    """Return token ids, ``uint32[T]``, as bytes.

    Raise ``OverflowError`` for ids outside ``uint32``.
    """
    words = np.ascontiguousarray(ids, dtype="<u4")
    raw = words.tobytes()
    if len(raw) >= _WORTH_TRYING:
        halves = words.view("<u2").reshape(-1, 2)
        packed = _codecs.compress(halves.T.tobytes())
        if len(packed) < len(raw):
            return bytes((HALVES,)) + packed
    return bytes((RAW,)) + raw


def unpack_ids(packed: bytes) -> TokenIds:
    """Return token ids, ``uint32[T]``, read-only. Raise ``ValueError`` for damaged bytes."""
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
    """Return logprobs, ``float32[T]``, as bytes, NaN payloads and the sign of zero included."""
    words = np.ascontiguousarray(logprobs, dtype="<f4")
    if words.nbytes >= _WORTH_TRYING:
        planes = words.view(np.uint8).reshape(-1, 4).T.tobytes()
        mantissas = 3 * len(words)
        exponents = _codecs.compress(planes[mantissas:])
        if len(exponents) < len(words):
            return b"".join((bytes((EXPONENTS,)), exponents, planes[:mantissas]))
    return bytes((RAW,)) + words.tobytes()


def unpack_logprobs(packed: bytes) -> Logprobs:
    """Return logprobs, ``float32[T]``, read-only. Raise ``ValueError`` for damaged bytes."""
    codec = packed[0]
    if codec == EXPONENTS:
        exponents = _decompress(packed[1:])  # what comes after the frame is left alone
        planes = packed[-3 * len(exponents) :] + exponents
    else:
        return np.frombuffer(unpack(packed), dtype="<f4")
    words = np.frombuffer(planes, dtype=np.uint8).reshape(4, -1).T.tobytes()
    return np.frombuffer(words, dtype="<f4")


_EXPERTS: Final = struct.Struct("<BHH")
"""Bytes of an expert's number, layers, and experts of a token in a layer."""
_COUNTS: Final = struct.Struct("<I")


def pack_experts(experts: RoutedExperts) -> bytes:
    """Return experts, ``[T, layers, top_k]``, as bytes; the numbers of one place lie together."""
    tokens, layers, top_k = experts.shape
    words = experts.astype(experts.dtype.newbyteorder("<"), copy=False)
    planes = words.reshape(tokens, layers * top_k).T.tobytes()
    return pack(_EXPERTS.pack(experts.itemsize, layers, top_k) + planes)


def unpack_experts(packed: bytes) -> RoutedExperts:
    """Return experts, ``uint8`` or ``uint16[T, layers, top_k]``.

    Raise ``ValueError`` for damaged bytes.
    """
    raw = unpack(packed)
    try:
        size, layers, top_k = _EXPERTS.unpack_from(raw)
    except struct.error as error:
        raise ValueError(f"a packed value is damaged: {error}") from error
    if size not in (1, 2) or not layers * top_k:
        raise ValueError("a packed value is damaged: it holds no experts")
    words = np.frombuffer(raw, dtype=f"<u{size}", offset=_EXPERTS.size)
    return np.ascontiguousarray(words.reshape(layers * top_k, -1).T).reshape(-1, layers, top_k)


def pack_kept(kept: KeptTokens) -> bytes:
    """Return the sets that tokens were drawn from as bytes."""
    counts = pack_ids(kept.counts)
    return _COUNTS.pack(len(counts)) + counts + pack_ids(kept.ids)


def unpack_kept(packed: bytes) -> KeptTokens:
    """Return what :func:`pack_kept` was given. Raise ``ValueError`` for damaged bytes."""
    try:
        (size,) = _COUNTS.unpack_from(packed)
        begin = _COUNTS.size
        kept = KeptTokens(
            unpack_ids(packed[begin : begin + size]), unpack_ids(packed[begin + size :])
        )
    except (struct.error, IndexError) as error:
        raise ValueError(f"a packed value is damaged: {error}") from error
    if int(kept.counts.sum(dtype=np.int64)) != len(kept.ids):
        raise ValueError("a packed value is damaged: its sets have other ids than it holds")
    return kept


def dump_json(value: Any) -> bytes:
    """Return compact JSON. Mappings that are not dicts are written as objects."""
    return orjson.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (frozenset, set)):
        return sorted(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no JSON form")
