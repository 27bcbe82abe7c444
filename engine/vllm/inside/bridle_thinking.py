"""Reasoning parsers for ``<think>`` as text, opened by the reply or by its prompt.

vLLM loads them with ``--reasoning-parser-plugin``. vLLM's own parsers for ``<think>`` need it to be
a token. They either take everything before ``</think>`` for reasoning, also if the reply never
opened it, or judge a stream and a whole reply differently. Here, as in Bridle's other engines, a
reply reasons if it begins with ``<think>`` (after blanks), and else is content as a whole. If the
prompt ends in ``<think>``, a reply reasons until it closes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.reasoning import ReasoningParser, ReasoningParserManager

OPEN, CLOSE = "<think>", "</think>"
BEFORE, INSIDE, AFTER = range(3)


@ReasoningParserManager.register_module("bridle_thinking")
class BridleThinkingParser(ReasoningParser):  # type: ignore[misc]  # vLLM is not installed here
    """A parser for replies that may open their reasoning.

    When streaming, vLLM makes one per reply.
    """

    first_place = BEFORE

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        self._place = self.first_place
        self._buffer = ""

    @property
    def reasoning_start_str(self) -> str:
        return OPEN

    @property
    def reasoning_end_str(self) -> str:
        return CLOSE

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Return false, because tags in a prompt belong to earlier turns."""
        return False

    def is_reasoning_end_streaming(
        self, input_ids: Sequence[int], delta_ids: Iterable[int]
    ) -> bool:
        return self._place == AFTER

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        return input_ids

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        start, end = self.vocab.get(OPEN), self.vocab.get(CLOSE)
        if start not in token_ids:
            return 0
        inside = token_ids[token_ids.index(start) + 1 :]
        return inside.index(end) if end in inside else len(inside)

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        reasoning, content = self._push(model_output)
        rest, self._buffer = self._buffer, ""
        if self._place == INSIDE:
            reasoning += rest
        else:
            content += rest
        return reasoning or None, content or None

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        reasoning, content = self._push(delta_text)
        if not reasoning and not content:
            return None
        return DeltaMessage(reasoning=reasoning or None, content=content or None)

    def get_streaming_fallback_content(self, text: str, request: Any) -> str | None:
        """Return the text still held back if the stream ended before anything but blanks came."""
        return self._buffer if self._place == BEFORE else None

    def _push(self, text: str) -> tuple[str, str]:
        """Return the reasoning and content that ``text`` settles, and buffer the undecided rest."""
        self._buffer += text
        reasoning = ""
        if self._place == BEFORE:
            started = self._buffer.lstrip()
            if started.startswith(OPEN):
                self._place, self._buffer = INSIDE, started.removeprefix(OPEN)
            elif OPEN.startswith(started):
                return "", ""
            else:
                self._place = AFTER
        if self._place == INSIDE:
            before, tag, after = self._buffer.partition(CLOSE)
            if tag:
                self._place, self._buffer = AFTER, after
            else:
                held = _partial_close(before)
                before, self._buffer = before[: len(before) - held], before[len(before) - held :]
            reasoning = before
        if self._place == AFTER:
            content, self._buffer = self._buffer, ""
            return reasoning, content
        return reasoning, ""


@ReasoningParserManager.register_module("bridle_thinking_open")
class BridleOpenThinkingParser(BridleThinkingParser):
    """A parser for replies whose prompt has opened the reasoning."""

    first_place = INSIDE


def _partial_close(text: str) -> int:
    """Return the length of the longest end of ``text`` that begins ``</think>``."""
    return next((n for n in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:n])), 0)
