"""The number of sampled tokens that a reply spends on reasoning, for engines that count none."""

from __future__ import annotations

from typing import Any

from bridle.proxy.engines.reply_body import Choice


class ReasoningCount:
    """Count the tokens of the chunks whose text is reasoning.

    A chunk's tokens may have no text yet, such as a tag's or a part of a character. They count with
    the next chunk of their choice that has one. A whole message counts if it is reasoning alone,
    because nothing shows where the reasoning of any other ends.
    """

    __slots__ = ("_pending", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self._pending: dict[int, int] = {}
        """Tokens of each choice that have no text yet."""

    def add(self, choice: Choice[Any]) -> None:
        """Count the tokens of a chunk."""
        pending, index = self._pending, choice.index
        count = pending.get(index, 0) + len(choice.token_ids or ())
        text = choice.delta or choice.message
        if text is None or not text.says_anything:
            pending[index] = count
            return
        pending[index] = 0
        if text.reasoning or text.reasoning_content:
            visible = text.content or text.tool_calls or text.function_call
            if choice.message is None or not visible:
                self.tokens += count
