"""Server-sent events, read incrementally: bytes that are cut anywhere become data payloads."""

from __future__ import annotations

import json
import re
from typing import Final

from bridle.errors import BridleError

END_OF_EVENT: Final = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_UNBOUNDED: Final = 1 << 62
_FIELDS: Final = (b"data:", b"error:")
_NEXT_FIELD: Final = re.compile(rb"\n(?:data|error):")
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class EventTooLarge(BridleError, ValueError):
    """One event has more bytes than the parser takes."""


class SseParser:
    """A parser that returns the ``data`` of each event, in order (WHATWG HTML, section 9.2.6).

    ``event``, ``id`` and ``retry`` fields, comment lines and events without data are skipped:
    engines use ``data`` alone. Only llama.cpp has a field ``error`` of its own, which becomes the
    payload ``{"error": …}``. Lines may end in LF, CRLF or CR; several ``data`` lines of one event
    are joined by LF.

    The work is linear in the bytes: a line's pieces are joined once, when its end has come.
    """

    __slots__ = ("_data", "_limit", "_pending", "_size")

    def __init__(self, limit: int = _UNBOUNDED) -> None:
        """``limit`` is the maximum number of bytes of an event."""
        self._limit = limit
        self._pending: list[bytes] = []
        """Pieces of the line that has not ended."""
        self._data: list[bytes] = []
        self._size = 0
        """Bytes of the event that has not ended."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the payloads of the events that ``chunk`` completes.

        Raise :class:`EventTooLarge`.
        """
        if (
            chunk.startswith(b"data: ")
            and chunk.find(b"\n") == len(chunk) - 2
            and chunk.endswith(b"\n")
            and not (self._pending or self._data or b"\r" in chunk)
        ):
            # One whole event, as engines mostly send them.
            return [chunk[6:-2]] if len(chunk) > 8 else []
        self._size += len(chunk)
        if self._size > self._limit:
            raise EventTooLarge(f"an event has more than {self._limit} bytes")
        if self._pending:
            ended = b"\n" in chunk or b"\r" in chunk or self._pending[-1].endswith(b"\r")
            if not ended:
                self._pending.append(chunk)
                return []
            chunk = self._with_pending(chunk)
        return self._lines(self._normalised(chunk) if b"\r" in chunk else chunk)

    def _with_pending(self, chunk: bytes) -> bytes:
        """Return ``chunk``, which ends a line, behind what came before it.

        A long line of data is taken at once, so that it is copied only once.
        """
        pieces, self._pending = self._pending, []
        first = pieces[0]
        if len(first) < 6 or not first.startswith(b"data:") or b"\r" in first or b"\r" in chunk:
            return b"".join((*pieces, chunk))
        end = chunk.index(b"\n")
        start = 6 if first.startswith(b" ", 5) else 5
        self._data.append(b"".join((memoryview(first)[start:], *pieces[1:], chunk[:end])))
        return chunk[end + 1 :]

    def _lines(self, pending: bytes) -> list[bytes]:
        """Return the payloads of the events that end in ``pending``, and keep its last line."""
        payloads: list[bytes] = []
        position = 0
        if pending.startswith(_BYTE_ORDER_MARK):
            pending = pending.removeprefix(_BYTE_ORDER_MARK)
        while (end := pending.find(b"\n", position)) >= 0:
            if not self._data and not pending.startswith(_FIELDS, position):
                # Between two events, nothing counts but the next line of data or of an error.
                position = _next_field(pending, end)
                self._size = len(pending) - position
                continue
            if end == position:
                if payload := b"\n".join(self._data):
                    payloads.append(payload)
                self._data = []
                self._size = len(pending) - position
            elif pending.startswith(b"data:", position):
                start = position + 5
                if pending.startswith(b" ", start):
                    start += 1
                self._data.append(pending[start:end])
            elif pending.startswith(b"error:", position):
                self._data.append(_error(pending[position + 6 : end].strip()))
            position = end + 1
        rest = pending[position:]
        self._pending = [rest] if rest else []
        return payloads

    def finish(self) -> list[bytes]:
        """Return the payloads that are left when the stream ends.

        A last event without its blank line still counts.
        """
        return self.feed(b"\n\n") if self._pending or self._data else []

    @staticmethod
    def _normalised(text: bytes) -> bytes:
        """Return ``text`` with line ends as LF.

        A CR at the very end stays, because it may be half of a CRLF.
        """
        held = text.endswith(b"\r")
        body = text[:-1] if held else text
        body = body.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        return body + b"\r" if held else body


def _next_field(text: bytes, end: int) -> int:
    """Return the index of the first line of data or an error after the line that ends at ``end``.

    If there is none, return the index of the last line, which may have not ended.
    """
    found = _NEXT_FIELD.search(text, end)
    return (found.start() if found else text.rfind(b"\n")) + 1


def _error(value: bytes) -> bytes:
    """Return the payload of a field ``error``, whose value is an object or plain text."""
    if not value.startswith(b"{"):
        value = json.dumps(value.decode("utf-8", "replace")).encode()
    return b'{"error": ' + value + b"}"
