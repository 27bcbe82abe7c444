"""A stream of events as columns: what its events share, and what each one says.

The events of a streamed reply are one another but for a word. They are cut into runs of events with
the same beginning and the same end; those are kept once per run, and after them the middles of all
events, which are the reply's text, token by token.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from bridle.store.encoding.bodies import shared_ends
from bridle.store.encoding.varint import read_varints, varints
from bridle.store.encoding.vocabulary import SEPARATOR

_BORDER: Final = b"\n\n"

_WORTH_CUTTING: Final = 4
"""Fewer events than this are stored as they are."""

_NOTHING: Final = (b"", b"")

_WORTH_SHARING: Final = 16
"""A run shares at least so many bytes."""


def to_columns(stream: bytes) -> bytes | None:
    """``stream`` as columns; ``None`` when it is no stream of events that would gain by it."""
    events = _events(stream)
    if len(events) < _WORTH_CUTTING or SEPARATOR in stream:
        return None
    counts: list[int] = []
    shared: list[bytes] = []
    middles: list[bytes] = []
    at = 0
    following = _ends(events[0], events[1])
    while at < len(events):
        here, following = following, _NOTHING
        if at + 2 < len(events):
            following = _ends(events[at + 1], events[at + 2])
        before, (start, end) = at, here
        known = len(start) + len(end)
        if known < _WORTH_SHARING or known < len(following[0]) + len(following[1]):
            # Unlike the next event, or a closer run begins with that one.
            start, end = events[at], b""
            middles.append(b"")
            at += 1
        else:
            middle = slice(len(start), -len(end) or None)
            for event in islice(events, at, None):
                if len(event) < known or not (event.startswith(start) and event.endswith(end)):
                    break
                middles.append(event[middle])
            at = len(middles)
            following = _ends(events[at], events[at + 1]) if at + 1 < len(events) else _NOTHING
        counts.append(at - before)
        shared += (start, end)
    head = varints([len(counts), *counts, *map(len, shared)])
    return head + b"".join(shared) + SEPARATOR.join(middles)


def from_columns(columns: bytes) -> bytes:
    """The stream that :func:`to_columns` was given."""
    (runs,), at = read_varints(columns, 0, 1)
    counts, at = read_varints(columns, at, runs)
    lengths, at = read_varints(columns, at, 2 * runs)
    shared: list[bytes] = []
    for length in lengths:
        shared.append(columns[at : at + length])
        at += length
    middles = iter(columns[at:].split(SEPARATOR))
    events: list[bytes] = []
    for number, count in enumerate(counts):
        start, end = shared[2 * number], shared[2 * number + 1]
        events += [b"%b%b%b" % (start, middle, end) for middle in islice(middles, count)]
    return _BORDER.join(events)


def _events(stream: bytes) -> list[bytes]:
    """The stream cut at its borders."""
    lines = stream.split(b"\n")
    # Looking for one byte is many times as fast, and most events are one line.
    one_line_each = len(lines) % 2 == 1 and not any(lines[1::2])
    return lines[::2] if one_line_each else stream.split(_BORDER)


def _ends(left: bytes, right: bytes) -> tuple[bytes, bytes]:
    """What two events share at both ends, up to a quote: words may begin alike by chance."""
    prefix, suffix = shared_ends(left, right)
    at = left.find(b'"', len(left) - suffix)
    return left[: left.rfind(b'"', 0, prefix) + 1], left[at:] if at >= 0 else b""
