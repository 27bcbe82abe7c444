"""The request and response bodies, exact to the byte.

They take little more room than the message columns.

A harness sends its whole history with every call. A request is kept as a splice of an earlier
request of its session: ``base[:prefix] + middle + base[len(base) - suffix:]``, and only the middle
is stored. The message columns already hold the text of a body, so zstd compresses the body with
these texts as its dictionary. For a response these are the replies; for a request they are its own
messages, the replies that came after its base, and the part of the base that it replaces. Bases
form chains; reading a request is a splice per link. A request that shares little with its base is
stored whole and begins a chain; its dictionary also has the tools. The SHA-256 of every body is
kept with its call, so that every read is verified.
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
"""The maximum length of a chain. The next body is stored whole, so that no read follows more
links."""

_WITH_REPLIES: Final = 16
"""The codec of a request whose dictionary has the replies of its base call."""

_BLOCK: Final = 64 << 10
"""Number of bytes that are compared at once."""

_DICTIONARY_GAIN: Final = 4
"""The minimum compression of a middle that is most of the request. A request that compresses less
is stored whole."""


class Earlier(msgspec.Struct, frozen=True, gc=False):
    """A request against which later ones can be stored."""

    data: bytes
    depth: int
    """Number of links from here to a request that is stored whole; 0 for that one."""
    replies: bytes = b""
    """The texts of the replies to this request, once its call has ended."""
    hashed: Any = None
    """The state of SHA-256 after the first :attr:`hashed_bytes` of the data; ``None`` if there is
    none."""
    hashed_bytes: int = 0


class Packed(msgspec.Struct, frozen=True, gc=False):
    """A body as it is stored."""

    prefix: int
    suffix: int
    depth: int
    data: bytes

    def contains(self, base: bytes) -> bool:
        """Return whether nearly all of ``base`` is part of the body."""
        return self.depth > 0 and self.prefix + self.suffix >= 0.9 * len(base)


def sha256_of(data: bytes) -> bytes:
    return sha256(data).digest()


def sha256_after(data: bytes, shared: int, base: Earlier | None) -> tuple[str, Any]:
    """Return the SHA-256 (hex) of ``data``, and its state after the first ``shared`` bytes.

    These bytes are also the first of ``base``, whose state is gone on from.
    """
    known = base is not None and base.hashed is not None and base.hashed_bytes <= shared
    state, at = (base.hashed.copy(), base.hashed_bytes) if base and known else (sha256(), 0)
    view = memoryview(data)
    state.update(view[at:shared])
    whole = state.copy()
    whole.update(view[shared:])
    return whole.hexdigest(), state


def texts_of(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> bytes:
    """Return the texts of messages and tools as bodies write them.

    They are equal for equal messages and tools.
    """
    said: list[Any] = list(tools)
    for message in messages:
        said += (message.reasoning, message.content, message.tool_call_id, message.name)
        for call in message.tool_calls:
            said += (call.id, call.name, call.arguments)
    return dump_json(said) if said else b""


def pack_request(data: bytes, base: Earlier | None, texts: bytes, alike: int = 0) -> Packed | None:
    """Pack ``data`` as a splice of ``base``.

    Return ``None`` if they share too little or the chain is too long. ``texts`` are those of the
    request's own messages. ``alike`` is a number of bytes that both are known to begin with.
    """
    if base is None or base.depth >= MAX_DEPTH:
        return None
    prefix, suffix = shared_ends(base.data, data, alike)
    replaced = base.data[prefix : len(base.data) - suffix]
    middle = data[prefix : len(data) - suffix]
    mostly = 2 * (prefix + suffix) >= len(data)
    if not mostly and 2 * len(replaced) < len(middle):
        return None
    codec = _WITH_REPLIES if base.replies else DICTIONARY
    packed = pack_against(middle, b"".join((replaced, base.replies, texts)), codec)
    # A harness may change a line at the top and repeat the rest.
    if not mostly and _DICTIONARY_GAIN * len(packed) > len(middle):
        return None
    return Packed(prefix, suffix, base.depth + 1, packed)


def pack_whole(data: bytes, texts: bytes) -> Packed:
    """Pack a response, or a request that begins a chain."""
    return Packed(0, 0, 0, pack_against(data, texts))


def unpack_whole(packed: Packed, texts: bytes) -> bytes:
    """Return the body that :func:`pack_whole` was given."""
    return unpack_against(packed.data, texts)


def unpack_request(packed: Packed, base: bytes, replies: bytes, texts: bytes) -> bytes:
    """Return the body that :func:`pack_request` was given.

    ``base`` is the base's bytes; ``replies`` are the texts of its call's replies.
    """
    end = len(base) - packed.suffix
    if packed.data[0] != _WITH_REPLIES:
        replies = b""
    dictionary = b"".join((base[packed.prefix : end], replies, texts))
    middle = unpack_against(packed.data, dictionary)
    return b"".join((base[: packed.prefix], middle, base[end:]))


def proved(data: bytes, digest: str) -> bytes:
    """Return ``data``. Raise ``ValueError`` if its SHA-256 is not ``digest`` (hex)."""
    if sha256(data).hexdigest() != digest:
        raise ValueError(f"a body does not have the bytes it was stored with ({digest})")
    return data


def shared_ends(left: bytes, right: bytes, alike: int = 0) -> tuple[int, int]:
    """Return the lengths of the common prefix and of the common suffix after it.

    They never overlap. ``alike`` is a part of the prefix that is known.
    """
    one, other = np.frombuffer(left, np.uint8), np.frombuffer(right, np.uint8)
    prefix = alike + common_bytes(left, right, alike, alike)
    return prefix, common_prefix(one[prefix:][::-1], other[prefix:][::-1])


def common_bytes(left: bytes, right: bytes, start: int = 0, other: int = 0) -> int:
    """Return the number of bytes that ``left[start:]`` and ``right[other:]`` begin with alike."""
    # In blocks, so that bytes which are alike are compared once.
    view, low, step = memoryview(left), 0, _BLOCK
    longest = min(len(left) - start, len(right) - other)
    while step > 0:
        step = min(step, longest - low)
        at = start + low
        if right.startswith(view[at : at + step], other + low):
            low += step
        else:
            step //= 2
    return low
