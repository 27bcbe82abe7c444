"""A limit on the bytes that the running calls of a process hold.

A call holds the bytes of its request and of its reply until it is over. When all calls together
hold more than the limit, the next one that grows and holds no less than the mean is ended: small
calls go on while a large one fills the memory. The bytes that an ended call holds until its record
is committed do not count, up to as much again as the limit, so that it does not end all other
calls.
"""

from __future__ import annotations

from typing import Final

import msgspec

from bridle.proxy.wire.canonical import ApiError

STEP: Final = 64 << 10
"""Bytes that a request or a reply may have before they are counted, and after each count."""


class InFlight:
    """The bytes that the running calls of one process hold."""

    __slots__ = ("bytes", "ending", "holders", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self.ending = 0
        """The part of ``bytes`` that belongs to calls that have been ended."""
        self.holders = 0
        """Number of calls with counted bytes."""


class Held(msgspec.Struct):
    """The bytes that one call holds.

    An :meth:`add` must be followed by a :meth:`release` in the end.
    """

    of: InFlight
    bytes: int = 0
    ending: int = 0

    def add(self, count: int) -> None:
        """Add ``count`` bytes. Raise :class:`ApiError` (503) when this call has to end."""
        everything = self.of
        everything.holders += not self.bytes
        self.bytes += count
        everything.bytes += count
        if (
            everything.bytes > everything.limit
            and (
                everything.bytes - everything.ending > everything.limit
                or everything.bytes > 2 * everything.limit
            )
            and self.bytes * everything.holders >= everything.bytes
        ):
            everything.ending += self.bytes - self.ending
            self.ending = self.bytes
            message = (
                f"the running calls hold more than {everything.limit} bytes, and this one is among "
                "the largest (in_flight_bytes)"
            )
            raise ApiError("overloaded", message, status=503, retry_after=1.0)

    def release(self) -> None:
        if self.bytes:
            self.of.holders -= 1
            self.of.bytes -= self.bytes
            self.of.ending -= self.ending
            self.bytes = self.ending = 0
