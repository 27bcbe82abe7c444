"""Priming of vLLM's incremental detokenizer with the end of a prompt instead of all of it.

vLLM decodes a reply token by token with a ``DecodeStream`` of tokenizers, which it primes with the
whole prompt: the stream decodes all of it, twice, before the first token of each reply. What a
token adds to the text depends on the few tokens before it, so the last ones are enough. A prompt
whose last tokens have no text, or end inside a character, primes the stream as before.

vLLM loads :class:`PrimeWithTail` as a middleware in each process of its API server, before it
serves. It looks ``DecodeStream`` up by its module for each request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tokenizers.decoders

TAIL = 64
"""Maximum number of a prompt's last tokens that prime a stream."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

SAMPLE = (
    'Der Baum läuft  schnell.\ndef f(x):\n    return x**2\n\t{"a": [1, null]} 日本語のテキスト。'
    "🤖🎉👩\u200d👩\u200d👧 العربية हिन्दी Ελληνικά\u200b\u00a0 <|im_end|>\n<|im_start|>user\n"
) * 4
"""A text that is cut at many places, some inside a character, to compare both ways."""

WholeStream = tokenizers.decoders.DecodeStream


class TailStream:
    """A ``DecodeStream`` that is primed with the last :data:`TAIL` of ``ids``."""

    def __init__(self, ids: Sequence[int] | None = None, skip_special_tokens: bool = False) -> None:
        self._ids = ids or []
        self._skip = skip_special_tokens

    def step(self, tokenizer: Any, token_id: int) -> str | None:
        """Return the text that ``token_id`` completes, or ``None``.

        From the second step on, the stream's own method stands in place of this one.
        """
        ids = self._ids
        if len(ids) > TAIL:
            text = tokenizer.decode(ids[-TAIL:], skip_special_tokens=self._skip)
            if text and not text.endswith(REPLACEMENT):
                ids = ids[-TAIL:]
        stream = WholeStream(ids=list(ids), skip_special_tokens=self._skip)
        self.step = stream.step  # type: ignore[method-assign]
        return stream.step(tokenizer, token_id)


def decodes_alike(tokenizer: Any) -> bool:
    """Return whether replies have the same text after the end of a prompt as after all of it."""
    ids = tokenizer.encode(SAMPLE).ids
    for skip in (True, False):
        for cut in range(TAIL + 1, len(ids) - 8, 7):
            whole = WholeStream(ids=ids[:cut], skip_special_tokens=skip)
            tail = TailStream(ids[:cut], skip)
            for each in ids[cut : cut + 24]:
                if tail.step(tokenizer, each) != whole.step(tokenizer, each):
                    return False
    return True


class PrimeWithTail:
    """A middleware that leaves the app as it is and replaces ``DecodeStream``."""

    def __new__(cls, app: Any) -> Any:
        tokenizers.decoders.DecodeStream = TailStream
        return app
