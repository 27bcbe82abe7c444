"""What tokens say: the bytes of each token id, so that text need not be stored beside its tokens.

Nearly all that a call's bodies and messages say is in its tokens already. Their text, written as it
stands in JSON, serves as zstd's dictionary (``store/encoding/texts.py``); nothing depends on its
being the right one, for a dictionary that does not fit only costs bytes. What it must be is the
same for the reader: the store keeps every vocabulary that it was written with, once, under its
digest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from typing import Final

import numpy as np
import zstandard
from numpy.typing import NDArray
from sqlalchemy import Connection, select
from sqlalchemy.dialects import postgresql, sqlite

from bridle.store.records import TokenIds
from bridle.store.schema.tables import vocabularies

SEPARATOR: Final = b"\x1e"
"""After pieces of text that are told apart; JSON escapes it, so that no text has it."""

_LEVEL: Final = 12
"""Written once per tokenizer."""

_SPECIAL: Final = re.compile(rb'[\x00-\x1f"\\]')
_SHORT: Final = {8: b"\\b", 9: b"\\t", 10: b"\\n", 12: b"\\f", 13: b"\\r", 34: b'\\"', 92: b"\\\\"}
_ESCAPES: Final = {byte: _SHORT.get(byte, b"\\u%04x" % byte) for byte in (*range(32), 34, 92)}


class Vocabulary:
    """The bytes of every token of one tokenizer, by id."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """``pieces[id]`` is what the token adds to a text; empty for one that adds nothing."""
        lengths = np.array([len(piece) for piece in pieces], dtype="<u4")
        self._plain = b"".join((len(pieces).to_bytes(4, "little"), lengths.tobytes(), *pieces))
        escaped = [_SPECIAL.sub(_escape, piece) for piece in pieces]
        self._lengths = np.array([len(piece) + 1 for piece in escaped], dtype=np.intp)
        self._text = np.frombuffer(b"".join(piece + SEPARATOR for piece in escaped), np.uint8)
        self._starts = self._lengths.cumsum() - self._lengths

    @cached_property
    def id(self) -> str:
        """SHA-256 hex of all pieces and of where each ends."""
        return sha256(self._plain).hexdigest()

    def texts(self, spans: Sequence[TokenIds]) -> list[bytes]:
        """Each span's text as JSON has it between its quotes, a separator after every token;
        unknown ids say nothing."""
        token_ids = np.concatenate(spans) if len(spans) > 1 else spans[0]
        if not len(token_ids):
            return [b"" for _ in spans]
        if int(token_ids.max()) >= len(self._lengths):
            return [self._text_of(span[span < len(self._lengths)])[0] for span in spans]
        text, ends = self._text_of(token_ids)
        texts, at, last = [], 0, 0
        for span in spans:
            at += len(span)
            end = int(ends[at - 1]) if at else 0
            texts.append(text[last:end])
            last = end
        return texts

    def _text_of(self, token_ids: TokenIds) -> tuple[bytes, NDArray[np.intp]]:
        """The text, and where each token's ends in it."""
        wanted = token_ids.astype(np.intp)
        lengths = self._lengths.take(wanted)
        ends = lengths.cumsum()
        first = self._starts.take(wanted)
        first -= ends
        first += lengths
        at = first.repeat(lengths)
        at += np.arange(len(at))
        return self._text.take(at).tobytes(), ends

    def packed(self) -> bytes:
        """All of it, for :meth:`unpack`."""
        return zstandard.ZstdCompressor(level=_LEVEL).compress(self._plain)

    @classmethod
    def unpack(cls, packed: bytes) -> Vocabulary:
        data = zstandard.ZstdDecompressor().decompress(packed)
        size = int.from_bytes(data[:4], "little")
        ends = np.frombuffer(data, dtype="<u4", count=size, offset=4).cumsum().tolist()
        text = data[4 + 4 * size :]
        starts = [0, *ends[:-1]] if size else []
        return cls([text[start:end] for start, end in zip(starts, ends, strict=True)])


def keep_vocabulary(connection: Connection, vocabulary: Vocabulary) -> None:
    """Adds it to the store, unless it is there, or another process adds it meanwhile."""
    this = vocabularies.c.id == vocabulary.id
    if connection.execute(select(vocabularies.c.id).where(this)).first() is None:
        insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
        row = insert(vocabularies).values(id=vocabulary.id, data=vocabulary.packed())
        connection.execute(row.on_conflict_do_nothing())


def _escape(found: re.Match[bytes]) -> bytes:
    return _ESCAPES[found.group()[0]]
