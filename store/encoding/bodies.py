"""Request and response bodies, exact to the byte, for next to no room beside the message columns.

A harness sends its whole history with every call. A request is kept as a splice of an earlier
request of its session: ``base[:prefix] + middle + base[len(base) - suffix:]``, and only the middle
is stored. The text of a body is in message columns already, so those texts are the dictionary that
zstd compresses it with: for a response the replies; for a request its own messages, the replies
that came after its base, and the part of the base that it replaces. Bases form chains; reading a
request is a splice per link. A request that shares little with its base is stored whole and begins
a chain; its dictionary also has the tools. The SHA-256 of every body is kept with its call, so
that reading proves itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, Final

import msgspec
import numpy as np

from bridle.store.encoding.packing import DICTIONARY, dump_json, pack_against, unpack_against
from bridle.store.records import Message
from bridle.store.tree import common_prefix

REQUEST: Final = "request"
RESPONSE: Final = "response"
"""Values of ``bodies.part``."""

MAX_DEPTH: Final = 1000
"""A chain this long is ended by a body stored whole, so that no read follows more links."""

_WITH_REPLIES: Final = 16
"""Codec of a request whose dictionary has the replies of its base call."""

_DICTIONARY_GAIN: Final = 4
"""So many times smaller the replaced bytes must make what replaces most of the base."""


class Earlier(msgspec.Struct, frozen=True, gc=False):
    """A request that later ones can be stored against."""

    data: bytes
    depth: int
    """Links from here to a request that is stored whole; 0 for that one."""
    replies: bytes = b""
    """The texts of the replies that it got, when its call has ended."""


class Packed(msgspec.Struct, frozen=True, gc=False):
    """A body as it is stored."""

    prefix: int
    suffix: int
    depth: int
    data: bytes

    def contains(self, base: bytes) -> bool:
        """Whether nearly all of ``base`` is part of the body."""
        return self.depth > 0 and self.prefix + self.suffix >= 0.9 * len(base)


def sha256_of(data: bytes) -> bytes:
    return sha256(data).digest()


def texts_of(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> bytes:
    """Their texts, written as bodies write them; equal for equal messages and tools."""
    said: list[Any] = list(tools)
    for message in messages:
        said += (message.reasoning, message.content, message.tool_call_id, message.name)
        for call in message.tool_calls:
            said += (call.id, call.name, call.arguments)
    return dump_json(said) if said else b""


def pack_request(data: bytes, base: Earlier | None, texts: bytes) -> Packed | None:
    """``data`` as a splice of ``base``; ``None`` when they share too little, or the chain is too
    long. ``texts`` are those of its own messages."""
    if base is None or base.depth >= MAX_DEPTH:
        return None
    prefix, suffix = shared_ends(base.data, data)
    replaced = base.data[prefix : len(base.data) - suffix]
    middle = data[prefix : len(data) - suffix]
    alike = 2 * (prefix + suffix) >= len(data)
    if not alike and 2 * len(replaced) < len(middle):
        return None
    codec = _WITH_REPLIES if base.replies else DICTIONARY
    packed = pack_against(middle, b"".join((replaced, base.replies, texts)), codec)
    # A harness may change a line at the top and repeat the rest.
    if not alike and _DICTIONARY_GAIN * len(packed) > len(middle):
        return None
    return Packed(prefix, suffix, base.depth + 1, packed)


def pack_whole(data: bytes, texts: bytes) -> Packed:
    """A response, or a request that begins a chain."""
    return Packed(0, 0, 0, pack_against(data, texts))


def unpack_whole(packed: Packed, texts: bytes) -> bytes:
    """What :func:`pack_whole` was given."""
    return unpack_against(packed.data, texts)


def unpack_request(packed: Packed, base: bytes, replies: bytes, texts: bytes) -> bytes:
    """What :func:`pack_request` was given, with the base's bytes and its call's replies."""
    end = len(base) - packed.suffix
    if packed.data[0] != _WITH_REPLIES:
        replies = b""
    dictionary = b"".join((base[packed.prefix : end], replies, texts))
    middle = unpack_against(packed.data, dictionary)
    return b"".join((base[: packed.prefix], middle, base[end:]))


def proved(data: bytes, digest: str) -> bytes:
    """``data``. Raises ``ValueError`` when it is not what the SHA-256 (hex) names."""
    if sha256(data).hexdigest() != digest:
        raise ValueError(f"a body does not have the bytes it was stored with ({digest})")
    return data


def shared_ends(left: bytes, right: bytes) -> tuple[int, int]:
    """Lengths of the common prefix and of the common suffix after it; they never overlap."""
    one, other = np.frombuffer(left, np.uint8), np.frombuffer(right, np.uint8)
    prefix = common_prefix(one, other)
    return prefix, common_prefix(one[prefix:][::-1], other[prefix:][::-1])
