"""Incremental decoding of token ids to text, without cutting a character in two.

The concatenation of all pieces and the flush is the tokenizer's own ``decode`` of all the ids.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Final, Protocol

from tokenizers import decoders

from bridle.engine.contract.tokenizer import Tokenizer

REPLACEMENT: Final = "\ufffd"


class Detokenizer(Protocol):
    """Incremental decoding of one token sequence."""

    def push(self, token_id: int) -> str:
        """Return the text that became certain with this token; it may be empty."""
        ...

    def flush(self) -> str:
        """Return the remaining text; an unfinished character becomes U+FFFD."""
        ...


class Vocabulary:
    """Per-model tables for detokenising, shared by all sequences."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(
            token_id for token_id, token in added.items() if token.special
        )
        self.byte_level = isinstance(tokenizer.backend.decoder, decoders.ByteLevel)
        self._bytes = tokenizer.vocabulary() if self.byte_level else []

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a byte-level token stands for; an unknown id stands for none."""
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def token_text(self, token_id: int) -> str:
        """Return the text of one token on its own, as logprob entries show it."""
        if self.byte_level:
            return self.token_bytes(token_id).decode(errors="replace")
        return self.tokenizer.decode([token_id])

    def detokenizer(self, skip: Collection[int]) -> Detokenizer:
        """Return a decoder that leaves out the ids in ``skip``."""
        if self.byte_level:
            return _ByteLevelDetokenizer(self, skip)
        return _WindowDetokenizer(self.tokenizer, skip)


class _ByteLevelDetokenizer:
    """A decoder for byte-level BPE (GPT-2, Qwen, Llama 3 …).

    Tokens are bytes, so it decodes UTF-8 as they come.
    """

    def __init__(self, vocabulary: Vocabulary, skip: Collection[int]) -> None:
        self._vocabulary = vocabulary
        self._skip = skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        return self._utf8.decode(self._vocabulary.token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDetokenizer:
    """A decoder for any other tokenizer.

    It emits the text that a window of ids has beyond the text of the window's start.

    The window begins at the last boundary where the text was certain, so that spaces that a decoder
    adds or strips at the beginning of a text cancel out.
    """

    def __init__(self, tokenizer: Tokenizer, skip: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        self._ids.append(token_id)
        before, text = self._decode()
        if text.endswith(REPLACEMENT) or len(text) <= len(before):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return text[len(before) :]

    def flush(self) -> str:
        before, text = self._decode()
        self._prefix = self._read = len(self._ids)
        return text[len(before) :]

    def _decode(self) -> tuple[str, str]:
        window: Sequence[int] = self._ids[self._prefix :]
        before = self._tokenizer.decode(window[: self._read - self._prefix])
        return before, self._tokenizer.decode(window)
