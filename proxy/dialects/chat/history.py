"""The messages of a chat request as canonical ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from bridle.proxy.dialects.body import Json, invalid, json_text, writable
from bridle.proxy.wire.canonical import Message, Role, ToolCall
from bridle.store.records import Note


class _Function(msgspec.Struct, gc=False):
    name: str
    arguments: str | Json | None = None


class _Call(msgspec.Struct, gc=False):
    id: str
    function: _Function


class ChatMessage(msgspec.Struct, gc=False):
    """A message as the client wrote it."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Json] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    audio: Any = None
    function_call: Any = None
    reasoning_details: Any = None
    refusal: Any = None
    thinking_blocks: Any = None


_NOT_SENT_ON: Final = ("reasoning_details", "thinking_blocks")
"""Fields of providers' replies that clients echo and no engine takes."""
_REFUSED: Final[Mapping[str, str]] = {
    "audio": "send its transcript as 'content'",
    "function_call": "send 'tool_calls', and the result as a message of the role 'tool'",
}
"""Fields of messages that are history, which the model would not see."""
_ROLES: Final[Mapping[str, Role]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


class Conversation:
    """The messages so far, with a note for each conversion and loss."""

    def __init__(
        self, messages: Iterable[Message] = (), notes: Mapping[Note, None] | None = None
    ) -> None:
        self.messages: list[Message] = [*messages]
        self.notes: dict[Note, None] = {**(notes or {})}

    def fork(self) -> Conversation:
        """Return a copy that goes on by itself."""
        return Conversation(self.messages, self.notes)

    def add(self, messages: Sequence[ChatMessage], first: int) -> None:
        """Add messages, of which the first is ``messages[first]`` of the request.

        Raise ``ApiError`` (400) that names the field.
        """
        # A session's whole history may pass here: nothing is called for a plain message.
        made, notes = self.messages, self.notes
        for position, wire in enumerate(messages, first):
            role = _ROLES[wire.role]
            if role != wire.role:
                notes[Note("role_converted", f"{wire.role} as {role}")] = None
            if (
                wire.refusal
                or wire.audio
                or wire.function_call
                or wire.reasoning_details
                or wire.thinking_blocks
            ):
                for name, remedy in _REFUSED.items():
                    if getattr(wire, name) and not wire.content and not wire.tool_calls:
                        raise invalid(
                            f"messages[{position}].{name}", f"is not carried out; {remedy}"
                        )
                for name in (*_NOT_SENT_ON, *_REFUSED):
                    if getattr(wire, name):
                        notes[Note("field_dropped", f"messages.{name}")] = None
                if wire.refusal and not wire.content:
                    wire.content = str(wire.refusal)
            content = wire.content
            if isinstance(content, list):
                _check_parts(content, f"messages[{position}].content")
            reasoning = wire.reasoning if wire.reasoning is not None else wire.reasoning_content
            calls = _calls(wire.tool_calls, position, notes) if wire.tool_calls else ()
            made.append(Message(role, content, reasoning, calls, wire.tool_call_id, wire.name))


def _check_parts(parts: Sequence[Json], field: str) -> None:
    """Raise :class:`ApiError` (400) for an invalid part.

    A part is invalid if its text is not a string, or if it cannot be written as JSON.
    """
    for index, part in enumerate(parts):
        if _is_plain(part):
            continue
        if not isinstance(part.get("text"), str) and ("text" in part or part.get("type") == "text"):
            raise invalid(f"{field}[{index}].text", "must be a string")
        writable(part, f"{field}[{index}]")


def _is_plain(part: Json) -> bool:
    """Return whether ``part`` is plain.

    A plain part is strings, one level deep at most, and has a text if it is of that type. Nearly
    all parts are plain, and an image of megabytes need not be written as JSON to be checked.
    """
    if part.get("type") == "text" and "text" not in part:
        return False
    for name, value in part.items():
        if type(value) is str:
            continue
        if name == "text" or type(value) is not dict:
            return False
        if not all([type(inner) is str for inner in value.values()]):
            return False
    return True


def _calls(calls: Sequence[_Call], position: int, notes: dict[Note, None]) -> tuple[ToolCall, ...]:
    made: list[ToolCall] = []
    for index, call in enumerate(calls):
        name, arguments = call.function.name, call.function.arguments
        if isinstance(arguments, dict):
            notes[Note("arguments_were_an_object", name)] = None
            field = f"messages[{position}].tool_calls[{index}].function.arguments"
            arguments = json_text(arguments, field)
        made.append(ToolCall(call.id, name, arguments or ""))
    return tuple(made)
