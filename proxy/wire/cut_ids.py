"""Cuts a long array of prompt ids out of an engine's JSON, so that it never becomes Python ints.

A prompt of 50,000 ids is most of its reply's bytes, and decoding it to a list and the list to an
array costs more than the rest of the call. Only an array of ids is cut: the key's closing quote is
followed by a colon, which cannot happen inside a JSON string (its quotes are escaped), the array
holds digits and single commas only, and the rest, with :data:`PLACEHOLDER` in the array's place, is
still decoded strictly. Everything else is left to the decoder.

A session's next prompt mostly repeats its last one, so :class:`KnownPrompt` reads only the ids that
come after it.
"""

from __future__ import annotations

from collections.abc import Callable
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
_IDS_END: Final = 2**32
_NO_IDS: Final = np.empty(0, dtype=np.uint32)


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
    """A session's latest long prompt as the engine reported it and as it was read."""

    __slots__ = ("_expected", "_ids", "_point", "_text", "size")

    def __init__(self) -> None:
        self._text = b""
        self._ids: TokenIds = _NO_IDS
        self._point: Point | None = None
        """The end of these ids in the session's tree, once they are in it."""
        self._expected: tuple[bytes, TokenIds] | None = None
        """The latest prompt that was sent, which the engine will probably report."""
        self.size = 0
        """Number of bytes held."""

    def read(self, text: bytes) -> TokenIds | None:
        """Return the result of :func:`read_ids` for ``text``, read-only."""
        if text == self._text:
            return self._ids
        sent, self._expected = self._expected, None
        if sent is not None and text == sent[0]:
            self._remember(text, sent[1])
            return sent[1]
        before, rest = self._text, text[len(self._text) :]
        # Without the comma, the number at the end of the earlier text continues in this one.
        if before and rest.startswith(b",") and text.startswith(before):
            new = read_ids(rest[1:])
            ids = None if new is None else np.concatenate([self._ids, new])
        else:
            ids = read_ids(text)
        if ids is None:
            return None
        ids.flags.writeable = False
        self._remember(text, ids)
        return ids

    def _remember(self, text: bytes, ids: TokenIds) -> None:
        self._text, self._ids, self._point = text, ids, None
        self.size = len(text) + ids.nbytes

    def settle(self, ids: TokenIds, point: Point) -> None:
        """Record that these ids, if they are the ones that were read last, end at ``point``."""
        if ids is self._ids:
            self._point = point

    def followed(self, point: Point | None, more: TokenIds) -> tuple[TokenIds, bytes] | None:
        """Return the ids up to ``point`` of the tree and then ``more``, and the ids' JSON text.

        The text has no brackets. Return ``None`` if these are not the ids that were read last.
        """
        mine = self._point
        if mine is None or point is None or mine.node is not point.node:
            return None
        if mine.position != point.position or not len(more):
            return None
        ids = np.concatenate([self._ids, more])
        ids.flags.writeable = False
        text = b"%b,%b" % (self._text, b",".join([b"%d" % one for one in more.tolist()]))
        self._expected = text, ids
        return ids, text


def cut_prompt_ids(
    payload: bytes, read: Callable[[bytes], TokenIds | None] = read_ids
) -> tuple[bytes, TokenIds | None]:
    """Return ``payload`` without its first ``prompt_token_ids``, and these as ``uint32[P]``.

    Return the payload unchanged and ``None`` if there is nothing to cut or any doubt.
    """
    if len(payload) < WORTH_CUTTING:
        return payload, None
    key = payload.find(_KEY)
    if key < 1 or payload.startswith(b"\\", key - 1):
        return payload, None
    start = key + len(_KEY)
    if payload.startswith(b" ", start):
        start += 1
    end = payload.find(b"]", start)
    if not payload.startswith(b"[", start) or end - start <= WORTH_CUTTING:
        return payload, None
    ids = read(payload[start + 1 : end])
    if ids is None:
        return payload, None
    return b"".join((payload[:start], _MARKED, payload[end + 1 :])), ids
