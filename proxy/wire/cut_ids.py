"""Cuts a long array of prompt ids out of an engine's JSON, so that it never becomes Python ints.

A prompt of 50,000 ids is most of its reply's bytes, and decoding it to a list and the list to an
array costs more than the rest of the call. Only an array of ids is cut: the key's closing quote is
followed by a colon, which cannot happen inside a JSON string (its quotes are escaped), the array
holds digits and single commas only, and the rest, with :data:`PLACEHOLDER` in the array's place, is
still decoded strictly. Everything else is left to the decoder.

A session's next prompt mostly repeats its last one, so :class:`KnownPrompt` reads only the ids that
come after it. The ids of a stream that are those which the engine was sent are not even collected:
:class:`PromptCut` compares them while they arrive.
"""

from __future__ import annotations

from threading import Lock
from typing import Final

import numpy as np

from bridle.store.records import TokenIds
from bridle.store.tree import Point

PLACEHOLDER: Final = "cut"
"""The string that replaces the array in the JSON."""

WORTH_CUTTING: Final = 1024
"""Minimum bytes of an array for which cutting is faster than decoding, if the beginning of the
prompt is known; for a new prompt both cost about the same."""

_MARKED: Final = b'"%b"' % PLACEHOLDER.encode()
_KEY: Final = b'"prompt_token_ids":'
_PLACES: Final = (_KEY + _MARKED, _KEY + b" " + _MARKED)
_IDS_END: Final = 2**32
_NO_IDS: Final = np.empty(0, dtype=np.uint32)
_BLOCK: Final = 64 << 10
"""Bytes from which on a block of a text is not added to."""
_ROOM: Final = 4
"""The share of the ids, as its inverse, for which there is room behind them."""

Blocks = tuple[bytes, ...]
"""Consecutive pieces of the JSON text of ids."""


def read_ids(text: bytes) -> TokenIds | None:
    """Return ``b"1,2,3"`` as ``uint32[3]``, or ``None`` if ``text`` has any other form."""
    if not text or text.translate(None, b"0123456789,"):
        return None
    if text.startswith(b",") or text.endswith(b",") or b",," in text:
        return None
    ids = np.fromstring(text, dtype=np.int64, sep=",")
    # Numbers beyond int64 are read as its largest value, and so fail here too.
    if int(ids.max()) >= _IDS_END:
        return None
    return ids.astype(np.uint32)


class KnownPrompt:
    """A session's latest long prompt as the engine reported it and as it was read.

    The ids and their text grow in place: a prompt of a million ids is copied by no call.
    """

    __slots__ = (
        "_buffer",
        "_expected",
        "_extending",
        "_filled",
        "_ids",
        "_point",
        "_text",
        "size",
    )

    def __init__(self) -> None:
        self._extending = Lock()
        self._text: Blocks = ()
        self._ids: TokenIds = _NO_IDS
        self._buffer: TokenIds = _NO_IDS
        """The memory of the ids, with room behind them, if they were extended."""
        self._filled = 0
        """Number of ids in the buffer: those of the longest prompt that was made in it."""
        self._point: Point | None = None
        """The end of these ids in the session's tree, once they are in it."""
        self._expected: tuple[Blocks, TokenIds] | None = None
        """The latest prompt that was sent, which the engine will probably report."""
        self.size = 0
        """Number of bytes held."""

    def found(self, payload: bytes, start: int) -> tuple[TokenIds, int] | None:
        """Return the ids whose text begins at ``start`` of the payload, and the index after it.

        Return ``None`` unless these are the ids that were sent or read last, up to a bracket.
        """
        for text, ids in filter(None, (self._expected, (self._text, self._ids))):
            end = _end_of(text, payload, start)
            if end > start and payload.startswith(b"]", end):
                self.reported(text, ids)
                return ids, end
        return None

    @property
    def expected(self) -> tuple[Blocks, TokenIds]:
        """The prompt that the engine will probably report: its ids' text and the ids."""
        return self._expected or (self._text, self._ids)

    def reported(self, text: Blocks, ids: TokenIds) -> None:
        """Record that the engine reported these ids, which were sent or read before."""
        if ids is not self._ids:
            self._remember(text, ids)

    def read(self, text: bytes) -> TokenIds | None:
        """Return the result of :func:`read_ids` for ``text``, read-only."""
        known = _end_of(self._text, text, 0)
        if 0 < known == len(text):
            return self._ids
        # Without the comma, the number at the end of the earlier text continues in this one.
        if known > 0 and text.startswith(b",", known):
            new = read_ids(text[known + 1 :])
            ids = None if new is None else self._extended(new)
        else:
            ids = read_ids(text)
        if ids is None:
            return None
        ids.flags.writeable = False
        self._remember((text,), ids)
        return ids

    def _remember(self, text: Blocks, ids: TokenIds) -> None:
        self._text, self._ids, self._point, self._expected = text, ids, None, None
        if ids.base is not self._buffer:
            self._buffer, self._filled = _NO_IDS, 0
        self.size = sum(map(len, text)) + max(ids.nbytes, self._buffer.nbytes)

    def settle(self, ids: TokenIds, point: Point) -> None:
        """Record that these ids, if they are the ones that were read last, end at ``point``."""
        if ids is self._ids:
            self._point = point

    def followed(self, point: Point | None, more: TokenIds) -> tuple[TokenIds, Blocks] | None:
        """Return the ids up to ``point`` of the tree and then ``more``, and the ids' JSON text.

        The text has no brackets. Return ``None`` if these are not the ids that were read last.
        """
        mine = self._point
        if mine is None or point is None or mine.node is not point.node:
            return None
        if mine.position != point.position or not len(more):
            return None
        ids = self._extended(more)
        added = b"," + b",".join([b"%d" % one for one in more.tolist()])
        *before, last = self._text
        text = (*before, last + added) if len(last) < _BLOCK else (*self._text, added)
        self._expected = text, ids
        return ids, text

    def _extended(self, more: TokenIds) -> TokenIds:
        """Return the ids and then ``more``, read-only, where there is room behind the ids."""
        with self._extending:  # a long tail is rendered in a thread
            known = self._ids
            before, length = len(known), len(known) + len(more)
            in_place = known.base is self._buffer and before == self._filled
            if not in_place or length > len(self._buffer):
                self._buffer = np.empty(length + length // _ROOM, dtype=np.uint32)
                self._buffer[:before] = known
            self._buffer[before:length] = more
            self._filled = length
            ids = self._buffer[:length]
        ids.flags.writeable = False
        return ids


def _end_of(text: Blocks, payload: bytes, at: int) -> int:
    """Return the index after ``text`` in the payload, which has it at ``at``, or -1."""
    for block in text:
        if not payload.startswith(block, at):
            return -1
        at += len(block)
    return at


class PromptCut:
    """Takes the expected ids out of a stream while its bytes arrive, so that none are kept.

    The first array of prompt ids in the first chunk is compared with the ids that the engine was
    sent. If it is another one, the stream stays as it is.
    """

    __slots__ = ("_block", "_ids", "_known", "_looking", "_offset", "_text", "taken")

    def __init__(self, known: KnownPrompt) -> None:
        self._known = known
        self._looking = True
        self._text: Blocks = ()
        self._ids: TokenIds | None = None
        """The expected ids while their text is compared."""
        self._block = self._offset = 0
        """The next block of the text to compare, and the number of its bytes that have come."""
        self.taken: TokenIds | None = None
        """The ids that were taken out; :data:`PLACEHOLDER` stands in their place."""

    def feed(self, chunk: bytes) -> bytes:
        """Return what the stream has in place of ``chunk``."""
        if self._ids is not None:
            return self._compared(b"", chunk, 0)
        if not self._looking:
            return chunk
        self._looking = False
        start, (text, ids) = _array_start(chunk), self._known.expected
        if start < 0 or not text:
            return chunk
        self._text, self._ids = text, ids
        return self._compared(chunk[:start], chunk, start + 1)

    def taken_from(self, payload: bytes) -> bool:
        """Return whether the ids that were taken out stood in this payload of the stream."""
        return self.taken is not None and any([place in payload for place in _PLACES])

    def end(self) -> bytes:
        """Return the bytes that are still held back at the end of the stream."""
        return b"" if self._ids is None else self._given_up()

    def _compared(self, before: bytes, chunk: bytes, at: int) -> bytes:
        """Compare the chunk from ``at`` on; return ``before`` and what follows it."""
        view = memoryview(chunk)
        while self._block < len(self._text):
            block = self._text[self._block]
            step = min(len(block) - self._offset, len(chunk) - at)
            if not block.startswith(view[at : at + step], self._offset):
                return b"".join((before, self._given_up(), view[at:]))
            at, self._offset = at + step, self._offset + step
            if self._offset < len(block):
                return before
            self._block, self._offset = self._block + 1, 0
        if at == len(chunk):
            return before
        if not chunk.startswith(b"]", at):
            return b"".join((before, self._given_up(), view[at:]))
        assert self._ids is not None, "it is compared"  # noqa: S101 - a programming error
        self.taken, self._ids = self._ids, None
        self._known.reported(self._text, self.taken)
        return b"".join((before, _MARKED, view[at + 1 :]))

    def _given_up(self) -> bytes:
        """Return the bytes that were compared, and compare no more."""
        last = [block[: self._offset] for block in self._text[self._block : self._block + 1]]
        self._ids = None
        return b"".join((b"[", *self._text[: self._block], *last))


def cut_prompt_ids(
    payload: bytes, known: KnownPrompt | None = None
) -> tuple[bytes, TokenIds | None]:
    """Return ``payload`` without its first ``prompt_token_ids``, and these as ``uint32[P]``.

    Return the payload unchanged and ``None`` if there is nothing to cut or any doubt.
    """
    if len(payload) < WORTH_CUTTING:
        return payload, None
    if (start := _array_start(payload)) < 0:
        return payload, None
    if known is not None and (found := known.found(payload, start + 1)) is not None:
        return _cut(payload, start, found[1], found[0])
    end = payload.find(b"]", start)
    if end - start <= WORTH_CUTTING:
        return payload, None
    text = payload[start + 1 : end]
    ids = read_ids(text) if known is None else known.read(text)
    return (payload, None) if ids is None else _cut(payload, start, end, ids)


def _array_start(payload: bytes) -> int:
    """Return the index of the bracket that opens the first array of prompt ids, or -1."""
    key = payload.find(_KEY)
    if key < 1 or payload.startswith(b"\\", key - 1):
        return -1
    start = key + len(_KEY)
    if payload.startswith(b" ", start):
        start += 1
    return start if payload.startswith(b"[", start) else -1


def _cut(payload: bytes, start: int, end: int, ids: TokenIds) -> tuple[bytes, TokenIds]:
    return b"".join((payload[:start], _MARKED, payload[end + 1 :])), ids
