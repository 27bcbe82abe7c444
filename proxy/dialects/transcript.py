"""A provider's pieces of a conversation, put together into chat-shaped messages.

Responses, Messages and Gemini carry an assistant turn as several items, blocks or parts. Chat
carries it as one message with its tool calls, directly followed by their results. Pieces belong to
one turn when their ids were minted for the same call, even if tool results stand between them;
pieces without such ids belong together while nothing stands between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bridle.proxy.wire import minting
from bridle.proxy.wire.canonical import Message, ToolCall
from bridle.store.records import Note

Content = str | list[dict[str, Any]]


def joined(parts: list[dict[str, Any]]) -> Content:
    """Return content parts as plain text if all are text, else as they are.

    The parts are joined line by line, as engines join them for templates that know only text.
    """
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def audio_part(data: str, form: str) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": form}}


def image_part(url: str, detail: str | None = None) -> dict[str, Any]:
    image: dict[str, Any] = {"url": url}
    if detail is not None:
        image["detail"] = detail
    return {"type": "image_url", "image_url": image}


@dataclass(slots=True)
class AssistantTurn:
    """An assistant message under construction."""

    call_id: str | None = None
    """Id of the call that produced it, if its ids name one."""
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    anchors: dict[str, None] = field(default_factory=dict)
    """The minted values, in order and each once."""

    def anchor(self, value: str | None) -> None:
        """Keep ``value`` if this proxy minted it."""
        if value is not None and value not in self.anchors and minting.read(value) is not None:
            self.anchors[value] = None

    def copy(self) -> AssistantTurn:
        return AssistantTurn(
            self.call_id, [*self.text], [*self.reasoning], [*self.tool_calls], {**self.anchors}
        )

    def message(self) -> Message:
        return Message(
            role="assistant",
            content="".join(self.text) if self.text else None,
            reasoning="".join(self.reasoning) if self.reasoning else None,
            tool_calls=tuple(self.tool_calls),
            anchors=tuple(self.anchors),
        )


class Transcript:
    """The conversation so far, with a note for each conversion and loss."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        """The messages that are whole."""
        self._open: AssistantTurn | None = None
        """The turn that later pieces may belong to."""
        self._results: list[Message] = []
        """The results of tools that stand after the open turn."""
        self._notes: dict[Note, None] = {}

    def fork(self) -> Transcript:
        """Return a copy that goes on by itself."""
        other = Transcript()
        other._messages, other._results = [*self._messages], [*self._results]
        other._open = None if self._open is None else self._open.copy()
        other._notes = {**self._notes}
        return other

    def extend(self, other: Transcript) -> None:
        """Add the messages and the notes of another transcript, which no piece here belongs to."""
        self._close()
        self._messages += other.messages
        self._notes |= other._notes

    def note(self, name: str, detail: str = "") -> None:
        """Record a conversion or a loss; the same one twice in a request counts once."""
        self._notes[Note(name, detail)] = None

    def system(self, content: Content) -> None:
        self._close()
        self._messages.append(Message(role="system", content=content))

    def user(self, content: Content) -> None:
        self._close()
        self._messages.append(Message(role="user", content=content))

    def tool(self, call_id: str, content: Content) -> None:
        self._results.append(Message(role="tool", content=content, tool_call_id=call_id))

    def turn(self, *ids: str | None, new_text: bool = False) -> AssistantTurn:
        """Return the assistant turn that a piece with these ids belongs to, opened if need be.

        ``new_text`` means that the piece is a message of its own, so two without known ids are not
        joined.
        """
        minted = minting.call_ids(value for value in ids if value is not None)
        call_id = minted[0] if minted else None
        current = self._open
        if current is not None:
            known = current.call_id is not None and call_id is not None
            adjacent = not self._results and not (new_text and current.text)
            if (current.call_id == call_id) if known else adjacent:
                current.call_id = current.call_id or call_id
                return current
        self._close()
        self._open = AssistantTurn(call_id=call_id)
        return self._open

    def _close(self) -> None:
        """Let no later piece belong to the open turn."""
        self._messages += self._pending()
        self._open = None
        self._results.clear()

    def _pending(self) -> list[Message]:
        turn = [] if self._open is None else [self._open.message()]
        return [*turn, *self._results]

    @property
    def messages(self) -> tuple[Message, ...]:
        return (*self._messages, *self._pending())

    @property
    def notes(self) -> tuple[Note, ...]:
        return tuple(self._notes)
