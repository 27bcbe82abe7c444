"""A tokenizer's vocabulary as bytes of the database."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import msgspec

from bridle.store.encoding.packing import pack, unpack


def pack_vocabulary(pieces: Sequence[bytes]) -> tuple[str, bytes]:
    """Return the digest of the bytes of every token id, and these bytes packed."""
    data = msgspec.msgpack.encode(pieces)
    return sha256(data).hexdigest(), pack(data)


def unpack_vocabulary(packed: bytes) -> list[bytes]:
    """Return the bytes of every token id. Raise ``ValueError`` for damaged ones."""
    try:
        return msgspec.msgpack.decode(unpack(packed), type=list[bytes])
    except msgspec.MsgspecError as error:
        raise ValueError(f"a vocabulary is damaged: {error}") from error
