"""The input items of a Responses request as canonical messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from bridle.proxy.dialects.body import Json, convert, invalid, json_text, pick, type_of
from bridle.proxy.dialects.responses.tools import ToolList, custom_arguments, flat_name
from bridle.proxy.dialects.transcript import (
    Content,
    Transcript,
    audio_part,
    image_part,
    joined,
    text_part,
)
from bridle.proxy.wire.canonical import ToolCall


class _Message(msgspec.Struct, gc=False):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Json] | None = None
    id: str | None = None


class _Piece(msgspec.Struct, gc=False):
    text: str | None = None


class _Reasoning(msgspec.Struct, gc=False):
    id: str | None = None
    encrypted_content: str | None = None
    content: list[_Piece] | None = None
    summary: list[_Piece] | None = None


class _Call(msgspec.Struct, kw_only=True, gc=False):
    """What all calls have. ``id`` stands for the ``call_id`` where an item type allows that."""

    id: str | None = None
    call_id: str | None = None


class _FunctionCall(_Call, gc=False):
    name: str
    namespace: str | None = None
    arguments: str | Json | None = None


class _CustomCall(_Call, gc=False):
    name: str
    namespace: str | None = None
    input: str | None = None


class _ShellCall(_Call, gc=False):
    action: Any = None


class _PatchCall(_Call, gc=False):
    operation: Any = None


class _Output(_Call, gc=False):
    output: Any = None


class _ConvertedOutput(_Output, gc=False):
    """Of a provider's own client-side tool."""


class _MoreTools(msgspec.Struct, gc=False):
    tools: list[Json] | None = None


class _Reference(msgspec.Struct, gc=False):
    id: str


class _Text(msgspec.Struct, gc=False):
    text: str


class _Refusal(msgspec.Struct, gc=False):
    refusal: str


class _Image(msgspec.Struct, gc=False):
    image_url: str | None = None
    detail: str | None = None


class _Sound(msgspec.Struct, gc=False):
    data: str
    format: str


class _Audio(msgspec.Struct, gc=False):
    input_audio: _Sound | None = None


_Item = (
    _Message
    | _Reasoning
    | _FunctionCall
    | _CustomCall
    | _ShellCall
    | _PatchCall
    | _Output
    | _MoreTools
)
_ITEMS: Final[Mapping[str, type[_Item]]] = {
    "message": _Message,
    "reasoning": _Reasoning,
    "function_call": _FunctionCall,
    "function_call_output": _Output,
    "custom_tool_call": _CustomCall,
    "custom_tool_call_output": _Output,
    "local_shell_call": _ShellCall,
    "local_shell_call_output": _ConvertedOutput,
    "shell_call": _ShellCall,
    "shell_call_output": _ConvertedOutput,
    "apply_patch_call": _PatchCall,
    "apply_patch_call_output": _ConvertedOutput,
    "additional_tools": _MoreTools,
}
_PARTS: Final[Mapping[str, type[_Text | _Refusal | _Image | _Audio]]] = {
    "input_text": _Text,
    "output_text": _Text,
    "text": _Text,
    "summary_text": _Text,
    "reasoning_text": _Text,
    "refusal": _Refusal,
    "input_image": _Image,
    "input_audio": _Audio,
}


def add_items(
    items: Sequence[Json],
    transcript: Transcript,
    tools: ToolList,
    known: Mapping[str, Mapping[str, Any]],
) -> tuple[str, ...]:
    """Adds the input's items to ``transcript`` in their order, with those of ``known`` in place of
    references to them. Returns the other ids that are referred to, each once.

    Raises ``ApiError`` (400) that names the field.
    """
    unknown: dict[str, None] = {}
    for index, item in enumerate(items):
        field = f"input[{index}]"
        kind = _kind(item, field)
        if kind != "item_reference":
            _add_item(item, kind, field, transcript, tools)
            continue
        transcript.note("item_reference")
        reference = convert(item, _Reference, field).id
        if reference in known:
            stored = dict(known[reference])
            _add_item(stored, _kind(stored, field), field, transcript, tools)
        else:
            unknown[reference] = None
            transcript.turn(reference).anchor(reference)
    return tuple(unknown)


def _kind(item: Json, field: str) -> str:
    """An item without a type is a message when it has a role, else a reference."""
    if item.get("type"):
        return type_of(item, field)
    return "message" if item.get("role") is not None else "item_reference"


def _add_item(given: Json, kind: str, field: str, transcript: Transcript, tools: ToolList) -> None:
    item = pick({**given, "type": kind}, _ITEMS, field)
    if isinstance(item, _ShellCall | _PatchCall | _ConvertedOutput | _MoreTools):
        transcript.note("item_converted", kind)
    match item:
        case _Message():
            _add_message(item, field, transcript)
        case _Reasoning():
            turn = transcript.turn(item.id, item.encrypted_content)
            turn.anchor(item.id)
            turn.anchor(item.encrypted_content)
            turn.reasoning.extend(piece.text or "" for piece in item.content or item.summary or ())
        case _FunctionCall():
            name = flat_name(item.name, item.namespace)
            _add_call(item, name, _arguments(item, field, transcript), field, transcript)
        case _CustomCall():
            name = flat_name(item.name, item.namespace)
            _add_call(item, name, custom_arguments(item.input or ""), field, transcript)
        case _ShellCall():
            arguments = json_text(item.action, f"{field}.action")
            _add_call(item, kind.removesuffix("_call"), arguments, field, transcript)
        case _PatchCall():
            arguments = json_text(item.operation, f"{field}.operation")
            _add_call(item, kind.removesuffix("_call"), arguments, field, transcript)
        case _Output():
            transcript.tool(_call_id(item, field), _output(item.output, field, transcript))
        case _MoreTools():
            tools.add(item.tools or (), f"{field}.tools")
        case None:
            transcript.note("item_dropped", kind[:64])


def _add_message(item: _Message, field: str, transcript: Transcript) -> None:
    if item.role == "assistant":
        turn = transcript.turn(item.id, new_text=True)
        turn.anchor(item.id)
        content = _content(item.content, f"{field}.content", transcript)
        if isinstance(content, str):
            turn.text.append(content)
        else:
            turn.text.extend(part["text"] for part in content if part["type"] == "text")
        return
    if item.role == "developer":
        transcript.note("role_converted", "developer as system")
    content = _content(item.content, f"{field}.content", transcript)
    (transcript.user if item.role == "user" else transcript.system)(content)


def _add_call(item: _Call, name: str, arguments: str, field: str, transcript: Transcript) -> None:
    call_id = _call_id(item, field)
    turn = transcript.turn(call_id, item.id)
    turn.anchor(item.id)
    turn.tool_calls.append(ToolCall(call_id, name, arguments))


def _call_id(item: _Call, field: str) -> str:
    call_id = item.id if item.call_id is None else item.call_id
    if call_id is None:
        raise invalid(f"{field}.call_id", "Field required")
    return call_id


def _arguments(item: _FunctionCall, field: str, transcript: Transcript) -> str:
    if isinstance(item.arguments, dict):
        transcript.note("arguments_were_an_object", item.name)
        return json_text(item.arguments, f"{field}.arguments")
    return item.arguments or ""


def _output(output: Any, field: str, transcript: Transcript) -> Content:
    """A result: a text, content parts, or another value as JSON text."""
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
        part = _part(given, f"{field}[{index}]")
        if part is None:
            transcript.note("part_dropped", given["type"][:64])
        else:
            parts.append(part)
    return joined(parts)


def _part(given: Json, field: str) -> Json | None:
    match pick(given, _PARTS, field):
        case _Text(text=text) | _Refusal(refusal=text):
            return text_part(text)
        case _Image(image_url=str(url), detail=detail):
            return image_part(url, detail)
        case _Audio(input_audio=_Sound(data=data, format=form)):
            return audio_part(data, form)
        case _:
            return None
