"""Server-sent events, read incrementally: bytes that are cut anywhere become data payloads."""

from __future__ import annotations


class SseParser:
    """The ``data`` of each event, in order (WHATWG HTML, section 9.2.6).

    ``event``, ``id`` and ``retry`` fields and comment lines are skipped: engines use ``data``
    alone. Lines may end in LF, CRLF or CR; several ``data`` lines of one event are joined by LF.
    """

    __slots__ = ("_data", "_pending")

    def __init__(self) -> None:
        self._pending = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """Payloads of the events that ``chunk`` completes."""
        if (
            chunk.startswith(b"data: ")
            and chunk.find(b"\n") == len(chunk) - 2
            and chunk.endswith(b"\n")
            and not (self._pending or self._data or b"\r" in chunk)
        ):
            return [chunk[6:-2]]  # one whole event, as engines mostly send them
        pending = self._pending + chunk if self._pending else chunk
        if b"\r" in pending:
            pending = self._normalised(pending)
        payloads: list[bytes] = []
        position = 0
        while (end := pending.find(b"\n", position)) >= 0:
            if end == position:
                if self._data:
                    payloads.append(b"\n".join(self._data))
                    self._data = []
            elif pending.startswith(b"data:", position):
                start = position + 5
                if pending.startswith(b" ", start):
                    start += 1
                self._data.append(pending[start:end])
            position = end + 1
        self._pending = pending[position:]
        return payloads

    def finish(self) -> list[bytes]:
        """What is left when the stream ends; a last event without its blank line still counts."""
        return self.feed(b"\n\n") if self._pending or self._data else []

    @staticmethod
    def _normalised(text: bytes) -> bytes:
        """Line ends as LF; a CR at the very end stays, because it may be half of a CRLF."""
        held = text.endswith(b"\r")
        body = text[:-1] if held else text
        body = body.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        return body + b"\r" if held else body
