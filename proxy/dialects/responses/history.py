"""The input items of a Responses request as canonical messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from bridle.proxy.dialects.body import Json, convert, invalid, json_text, type_of, typed
from bridle.proxy.dialects.responses.tools import ToolList, custom_arguments, flat_name
from bridle.proxy.dialects.transcript import (
    Content,
    Transcript,
    audio_part,
    image_part,
    joined,
    text_part,
)
from bridle.proxy.dialects.unsupported import as_text, refuse_kind
from bridle.proxy.wire.canonical import ToolCall


class _Item(msgspec.Struct, gc=False):
    """An input item of any type that is known."""

    id: str | None = None
    call_id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    name: str = ""
    namespace: str | None = None
    content: str | list[Json] | None = None
    summary: list[Json] | None = None
    encrypted_content: str | None = None
    arguments: str | Json | None = None
    input: str | None = None
    output: Any = None
    action: Any = None
    operation: Any = None
    tools: list[Json] | None = None


class _Sound(msgspec.Struct, gc=False):
    data: str
    format: str


class _Part(msgspec.Struct, gc=False):
    """A part of a message's or a result's content, of any type that is known."""

    text: str = ""
    refusal: str = ""
    image_url: str | None = None
    detail: str | None = None
    input_audio: _Sound | None = None


_Required = Mapping[str, tuple[str, ...]]
_OWN_CALLS: Final = {"local_shell_call": "action", "shell_call": "action"} | {
    "apply_patch_call": "operation"
}
"""Calls of a provider's own client-side tools, with the field that holds their arguments. Each
becomes a call of the function that its type names."""
_OUTPUTS: Final = frozenset(
    {"function_call_output", "custom_tool_call_output", *(f"{kind}_output" for kind in _OWN_CALLS)}
)
_ITEMS: Final[_Required] = {
    "message": ("role",),
    "reasoning": (),
    "function_call": ("name",),
    "custom_tool_call": ("name",),
    "additional_tools": (),
    **dict.fromkeys((*_OWN_CALLS, *_OUTPUTS), ()),
}
_SUMMARY: Final = "send the messages that it stands for, or a summary of them as a message"
REFUSED: Final[Mapping[str, str]] = {
    "compaction": _SUMMARY,
    "compaction_summary": _SUMMARY,
    "context_compaction": _SUMMARY,
    "input_file": "send its text as 'input_text', or an image of it",
    "input_image": "send 'image_url', because no files are held here",
    "input_audio": "send 'input_audio' with its data",
}
"""Types of items and content parts whose content is not available here."""
_PARTS: Final[_Required] = {
    "input_text": ("text",),
    "output_text": ("text",),
    "text": ("text",),
    "summary_text": ("text",),
    "reasoning_text": ("text",),
    "refusal": ("refusal",),
    "input_image": (),
    "input_audio": (),
}


class Items:
    """The input items of a request, and what they bring besides messages."""

    def __init__(self, tools: ToolList, known: Mapping[str, Mapping[str, Any]]) -> None:
        """``tools`` gets the tools that stand among the items. ``known`` are recorded items."""
        self.unknown: dict[str, None] = {}
        """The ids that are referred to and not known, each once."""
        self.self_contained = True
        """True if the items are messages alone, without references and tools."""
        self._tools = tools
        self._known = known

    def add(self, transcript: Transcript, items: Sequence[Json], first: int) -> None:
        """Add items to ``transcript``; the first is ``input[first]`` of the request.

        Known items take the place of references to them. Raise ``ApiError`` (400) that names the
        field.
        """
        for index, item in enumerate(items, first):
            field = f"input[{index}]"
            kind = _kind(item, field)
            if kind != "item_reference":
                self._add(item, kind, field, transcript)
                continue
            self.self_contained = False
            transcript.note("item_reference")
            reference = convert(item.get("id"), str, f"{field}.id")
            if reference in self._known:
                stored = dict(self._known[reference])
                self._add(stored, _kind(stored, field), field, transcript)
            else:
                self.unknown[reference] = None
                transcript.turn(reference).anchor(reference)

    def _add(self, item: Json, kind: str, field: str, transcript: Transcript) -> None:
        if kind == "additional_tools":
            self.self_contained = False
        _add_item(item, kind, field, transcript, self._tools)


def _kind(item: Json, field: str) -> str:
    """Return the item's type.

    An item without one is a message if it has a role, else a reference.
    """
    if item.get("type"):
        return type_of(item, field)
    return "message" if item.get("role") is not None else "item_reference"


def _add_item(given: Json, kind: str, field: str, transcript: Transcript, tools: ToolList) -> None:
    _, item = typed({**given, "type": kind}, _Item, _ITEMS, field)
    if item is None:
        refuse_kind(kind, REFUSED, field)
        transcript.note("item_as_text", kind[:64])
        transcript.user(as_text(kind, given, field))
    elif kind == "message":
        _add_message(item, field, transcript)
    elif kind == "reasoning":
        turn = transcript.turn(item.id, item.encrypted_content)
        turn.anchor(item.id)
        turn.anchor(item.encrypted_content)
        pieces = item.content if item.content and isinstance(item.content, list) else item.summary
        turn.reasoning.extend(str(piece.get("text") or "") for piece in pieces or ())
    elif kind in _OUTPUTS:
        if kind.removesuffix("_output") in _OWN_CALLS:
            transcript.note("item_converted", kind)
        transcript.tool(_call_id(item, field), _output(item.output, field, transcript))
    elif kind == "additional_tools":
        transcript.note("item_converted", kind)
        tools.add(item.tools or (), f"{field}.tools")
    else:
        _add_call(item, kind, field, transcript)


def _add_message(item: _Item, field: str, transcript: Transcript) -> None:
    content = _content(item.content, f"{field}.content", transcript)
    if item.role == "assistant":
        turn = transcript.turn(item.id, new_text=True)
        turn.anchor(item.id)
        if isinstance(content, str):
            turn.text.append(content)
        else:
            turn.text.extend(part["text"] for part in content if part["type"] == "text")
    elif item.role == "user":
        transcript.user(content)
    else:
        if item.role == "developer":
            transcript.note("role_converted", "developer as system")
        transcript.system(content)


def _add_call(item: _Item, kind: str, field: str, transcript: Transcript) -> None:
    name = flat_name(item.name, item.namespace)
    if kind == "function_call":
        arguments = _arguments(item, field, transcript)
    elif kind == "custom_tool_call":
        arguments = custom_arguments(item.input or "")
    else:
        transcript.note("item_converted", kind)
        name, place = kind.removesuffix("_call"), _OWN_CALLS[kind]
        arguments = json_text(getattr(item, place), f"{field}.{place}")
    call_id = _call_id(item, field)
    turn = transcript.turn(call_id, item.id)
    turn.anchor(item.id)
    turn.tool_calls.append(ToolCall(call_id, name, arguments))


def _call_id(item: _Item, field: str) -> str:
    """Return ``call_id``, or ``id`` where an item type allows that instead."""
    call_id = item.id if item.call_id is None else item.call_id
    if call_id is None:
        raise invalid(f"{field}.call_id", "Field required")
    return call_id


def _arguments(item: _Item, field: str, transcript: Transcript) -> str:
    if isinstance(item.arguments, dict):
        transcript.note("arguments_were_an_object", item.name)
        return json_text(item.arguments, f"{field}.arguments")
    return item.arguments or ""


def _output(output: Any, field: str, transcript: Transcript) -> Content:
    """Return a result: a text, content parts, or another value as JSON text."""
    if output is None or isinstance(output, str):
        return output or ""
    field = f"{field}.output"
    if isinstance(output, list) and all(_is_part(part) for part in output):
        return _content(output, field, transcript)
    return json_text(output, field)


def _is_part(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("type"), str)


def _content(content: str | list[Json] | None, field: str, transcript: Transcript) -> Content:
    if not isinstance(content, list):
        return content or ""
    parts: list[Json] = []
    for index, given in enumerate(content):
        kind, part = typed(given, _Part, _PARTS, f"{field}[{index}]")
        if part is not None and part.image_url is not None:
            parts.append(image_part(part.image_url, part.detail))
        elif part is not None and part.input_audio is not None:
            parts.append(audio_part(part.input_audio.data, part.input_audio.format))
        elif part is None or kind in ("input_image", "input_audio"):
            refuse_kind(kind, REFUSED, f"{field}[{index}]")
            transcript.note("part_as_text", kind[:64])
            parts.append(text_part(as_text(kind, given, f"{field}[{index}]")))
        else:
            parts.append(text_part(part.refusal if kind == "refusal" else part.text))
    return joined(parts)
