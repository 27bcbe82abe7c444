"""White space that an engine leaves between reasoning and tool calls, kept from the client.

Parsers return the line breaks around ``</think>`` and ``<tool_call>`` as text. As items or blocks
of their own they would appear as empty messages, and some harnesses refuse to send those back. The
record keeps them. A client gets blank text only with other text, or when the reply has nothing
else.
"""

from __future__ import annotations

from bridle.proxy.wire.canonical import ChoiceReply


class BlankText:
    """Holds text back while it is blank and no block of text is open."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: list[str] = []

    def opening(self, text: str) -> str:
        """Return the beginning of a new block of text.

        Return an empty string while all of it is blank.
        """
        self._held.append(text)
        return self.rest() if text.strip() else ""

    def rest(self) -> str:
        """Return and clear the text that is held."""
        held, self._held = self._held, []
        return "".join(held)


def shown_text(choice: ChoiceReply) -> str:
    """Return the text of a whole reply that its client gets."""
    return "" if choice.tool_calls and choice.text.isspace() else choice.text
