"""The part of a chat request that was read before.

A harness sends its whole history with every call, and nearly always in the very bytes of the call
before. Where the bytes up to the end of a message are those of an earlier body, that message and
all before it are the earlier one's: a JSON reader that has seen the same bytes stands at the same
place. So only what follows is parsed, and the time grows with what is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

from bridle.proxy.wire.canonical import Message
from bridle.store.records import Note

_SPACE = b" \t\r\n"


class _Messages(msgspec.Struct):
    messages: Annotated[list[msgspec.Raw], msgspec.Meta(min_length=1)]


_DECODER = msgspec.json.Decoder(_Messages)


@dataclass(slots=True, eq=False)
class ParsedHistory:
    """The messages of one request, and where they stand in its body."""

    start: int
    """Where the first message begins."""
    ends: tuple[int, ...]
    """Where each message ends."""
    body: bytes
    """The whole of it, which the store's writer holds too: a copy would be held twice."""
    messages: tuple[Message, ...]
    notes: tuple[tuple[Note, ...], ...]
    """What was converted in each message."""
    units: Sequence[Any] = ()
    """Lineage's steps of these messages, once it has cut them (``proxy/lineage/digests.py``)."""

    @property
    def size(self) -> int:
        """Bytes held, counting the parsed messages as much as their text."""
        return 2 * self.ends[-1]

    def shared(self, body: bytes) -> int:
        """How many messages ``body`` begins with as they stand here."""
        end = self.ends[-1]
        if body[:end] == self.body[:end]:
            return len(self.ends)
        if body[: self.start] != self.body[: self.start]:
            return 0
        low, high, same = 0, len(self.ends) - 1, self.start
        while low < high:
            middle = (low + high) // 2
            if body.startswith(self.body[same : self.ends[middle]], same):
                low, same = middle + 1, self.ends[middle]
            else:
                high = middle
        return low

    def without(self, count: int, body: bytes) -> tuple[bytes, int] | None:
        """``body`` with its first ``count`` messages (which it shares) cut out, and where the rest
        begins in it; ``None`` when no message would be left."""
        rest = _skip(body, self.ends[count - 1])
        if body[rest : rest + 1] != b",":
            return None
        rest = _skip(body, rest + 1)
        return body[: self.start] + body[rest:], rest


def spans(body: bytes) -> list[tuple[int, int]] | None:
    """Where each message of ``body`` begins and ends; ``None`` when that cannot be told.

    ``body`` must be a valid chat request.
    """
    base = _address(body)
    found: list[tuple[int, int]] = []
    for raw in _DECODER.decode(body).messages:
        view = memoryview(raw)
        start = _address(view) - base
        if not 0 <= start <= start + len(view) <= len(body):
            return None
        found.append((start, start + len(view)))
    return found


def parsed(
    body: bytes, messages: tuple[Message, ...], notes: tuple[tuple[Note, ...], ...]
) -> ParsedHistory | None:
    """The history of a request that was parsed whole."""
    found = spans(body)
    if found is None:
        return None
    ends = tuple(end for _, end in found)
    return ParsedHistory(found[0][0], ends, body, messages, notes)


def _address(buffer: bytes | memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


def _skip(body: bytes, at: int) -> int:
    """The first place from ``at`` on that is not white space."""
    while at < len(body) and body[at] in _SPACE:
        at += 1
    return at
