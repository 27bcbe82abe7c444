"""Messages as JSON in a few large blocks, so that the next request writes only what is new."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import orjson

_BLOCK: Final = 64 << 10
"""Bytes from which on a block is not added to. What is behind it is written again where a request
goes on from the middle of a block."""


class Written:
    """The first messages of a request as JSON for the engine."""

    __slots__ = ("_blocks", "_counts")

    def __init__(self, blocks: Iterable[bytes] = (), counts: Iterable[int] = ()) -> None:
        self._blocks = [*blocks]
        self._counts = [*counts]
        """Number of messages up to the end of each block."""

    @property
    def count(self) -> int:
        """Number of messages."""
        return self._counts[-1] if self._counts else 0

    def first(self, count: int) -> Written:
        """Return at most the first ``count`` messages: those of whole blocks."""
        kept = len([one for one in self._counts if one <= count])
        return Written(self._blocks[:kept], self._counts[:kept])

    def add(self, messages: Iterable[Mapping[str, Any]]) -> None:
        """Add messages, in chat shape, behind those that are here."""
        for message in messages:
            text = orjson.dumps(message)
            if self._blocks and len(self._blocks[-1]) < _BLOCK:
                self._blocks[-1] = b"%b,%b" % (self._blocks[-1], text)
                self._counts[-1] += 1
            else:
                self._counts.append(self.count + 1)
                self._blocks.append(text if not self._blocks else b"," + text)

    def pieces(self) -> tuple[bytes, ...]:
        """Return the pieces of a JSON array of the messages."""
        return (b"[", *self._blocks, b"]")
