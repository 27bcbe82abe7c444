"""Responses items: the input's as chat messages, and the output's as the client gets them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from bridle.proxy.dialects.fields import Fields, invalid, json_text
from bridle.proxy.dialects.responses.tools import Tools, custom_arguments, flat_name
from bridle.proxy.dialects.turns import Content, Transcript, image_part, joined, text_part
from bridle.proxy.wire.canonical import ToolCall

_CALL_BODIES: Final = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
}
"""Calls of a provider's own client-side tools: the function that each becomes, and the field that
holds its arguments."""
_CALL_OUTPUTS: Final = frozenset(f"{kind}_output" for kind in _CALL_BODIES)


def add_items(
    items: Sequence[Fields],
    transcript: Transcript,
    tools: Tools,
    known: Mapping[str, Mapping[str, Any]],
) -> tuple[str, ...]:
    """Files the input's items in ``transcript``, in their order, those of ``known`` for references
    to them. The other ids that are referred to, each once."""
    unknown: dict[str, None] = {}
    for item in items:
        kind = _kind(item)
        if kind != "item_reference":
            _add_item(item, kind, transcript, tools)
            continue
        transcript.note("item_reference")
        reference = item.need_string("id")
        if reference in known:
            stored = Fields(dict(known[reference]), item.where)
            _add_item(stored, _kind(stored), transcript, tools)
        else:
            unknown[reference] = None
            transcript.turn(reference).anchor(reference)
    return tuple(unknown)


def _kind(item: Fields) -> str:
    """An item without a type is a message when it has a role, else a reference."""
    return item.string("type") or ("message" if item.raw("role") is not None else "item_reference")


def _add_item(item: Fields, kind: str, transcript: Transcript, tools: Tools) -> None:
    if kind == "message":
        _add_message(item, transcript)
    elif kind == "reasoning":
        _add_reasoning(item, transcript)
    elif kind == "function_call" or kind == "custom_tool_call":
        _add_call(item, kind, transcript)
    elif kind == "function_call_output" or kind == "custom_tool_call_output":
        transcript.tool(_call_id(item), _output(item, transcript))
    elif kind in _CALL_BODIES:
        _add_builtin_call(item, kind, transcript)
    elif kind in _CALL_OUTPUTS:
        transcript.note("item_converted", kind)
        transcript.tool(_call_id(item), _output(item, transcript))
    elif kind == "additional_tools":
        transcript.note("item_converted", kind)
        for tool in item.objects("tools"):
            tools.add(tool, transcript)
    else:
        transcript.note("item_dropped", kind[:64])


def _add_message(item: Fields, transcript: Transcript) -> None:
    role = item.need_string("role")
    if role == "assistant":
        turn = transcript.turn(item.string("id"), new_text=True)
        turn.anchor(item.string("id"))
        content = _content(item, "content", transcript)
        if isinstance(content, str):
            turn.text.append(content)
        else:
            turn.text.extend(part["text"] for part in content if part["type"] == "text")
    elif role == "user":
        transcript.user(_content(item, "content", transcript))
    elif role == "system":
        transcript.system(_content(item, "content", transcript))
    elif role == "developer":
        transcript.note("role_converted", "developer as system")
        transcript.system(_content(item, "content", transcript))
    else:
        raise invalid(item.path("role"), "must be user, assistant, system or developer")


def _add_reasoning(item: Fields, transcript: Transcript) -> None:
    identifier, encrypted = item.string("id"), item.string("encrypted_content")
    turn = transcript.turn(identifier, encrypted)
    turn.anchor(identifier)
    turn.anchor(encrypted)
    parts = item.objects("content") or item.objects("summary")
    turn.reasoning.extend(part.string("text") or "" for part in parts)


def _add_call(item: Fields, kind: str, transcript: Transcript) -> None:
    call_id, identifier = _call_id(item), item.string("id")
    if kind == "custom_tool_call":
        arguments = custom_arguments(item.string("input") or "")
    else:
        arguments = _arguments(item, transcript)
    turn = transcript.turn(call_id, identifier)
    turn.anchor(identifier)
    name = flat_name(item.need_string("name"), item.string("namespace"))
    turn.tool_calls.append(ToolCall(call_id, name, arguments))


def _add_builtin_call(item: Fields, kind: str, transcript: Transcript) -> None:
    transcript.note("item_converted", kind)
    name, body = _CALL_BODIES[kind]
    call_id, identifier = _call_id(item), item.string("id")
    turn = transcript.turn(call_id, identifier)
    turn.anchor(identifier)
    arguments = json_text(item.raw(body), item.path(body))
    turn.tool_calls.append(ToolCall(call_id, name, arguments))


def _call_id(item: Fields) -> str:
    """``call_id``, or ``id`` where an item type allows that instead."""
    call_id = item.string("call_id")
    if call_id is None:
        call_id = item.string("id")
    if call_id is None:
        raise invalid(item.path("call_id"), "is required and must be a string")
    return call_id


def _arguments(item: Fields, transcript: Transcript) -> str:
    arguments = item.raw("arguments")
    if isinstance(arguments, dict):
        transcript.note("arguments_were_an_object", item.need_string("name"))
        return json_text(arguments, item.path("arguments"))
    return item.string("arguments") or ""


def _output(item: Fields, transcript: Transcript) -> Content:
    output = item.raw("output")
    if output is None or isinstance(output, str):
        return output or ""
    if isinstance(output, list) and all(_is_part(part) for part in output):
        return _content(item, "output", transcript)
    return json_text(output, item.path("output"))


def _is_part(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("type"), str)


def _content(item: Fields, name: str, transcript: Transcript) -> Content:
    """A message's or an output's content: a string, or parts."""
    content = item.raw(name)
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for part in item.objects(name):
        converted = _part(part, transcript)
        if converted is not None:
            parts.append(converted)
    return joined(parts)


def _part(part: Fields, transcript: Transcript) -> dict[str, Any] | None:
    kind = part.need_string("type")
    if kind in ("input_text", "output_text", "text", "summary_text", "reasoning_text"):
        return text_part(part.need_string("text"))
    if kind == "refusal":
        return text_part(part.need_string("refusal"))
    if kind == "input_image" and (url := part.string("image_url")) is not None:
        return image_part(url, part.string("detail"))
    if kind == "input_audio" and (audio := part.child("input_audio")) is not None:
        content = {"data": audio.need_string("data"), "format": audio.need_string("format")}
        return {"type": "input_audio", "input_audio": content}
    transcript.note("part_dropped", kind[:64])
    return None


def reasoning_item(
    identifier: str, text: str, *, summarise: bool, signature: str | None, status: str
) -> dict[str, Any]:
    """A ``reasoning`` output item; ``text`` stands in the summary or in the content."""
    item: dict[str, Any] = {"id": identifier, "type": "reasoning", "summary": []}
    if summarise:
        item["summary"] = [{"type": "summary_text", "text": text}]
    else:
        item["content"] = [{"type": "reasoning_text", "text": text}]
    if signature is not None:
        item["encrypted_content"] = signature
    item["status"] = status
    return item


def message_item(identifier: str, part: dict[str, Any], status: str) -> dict[str, Any]:
    return {
        "id": identifier,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [part],
    }


def output_text(text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def call_item(
    identifier: str, call: ToolCall, tools: Tools, status: str, text: str | None = None
) -> dict[str, Any]:
    """A ``function_call`` or ``custom_tool_call`` output item; ``text`` is the latter's input."""
    tool = tools.name(call.name)
    item: dict[str, Any] = {"id": identifier, "type": "function_call", "status": status}
    item["call_id"] = call.id
    item["name"] = tool.name
    if tool.namespace is not None:
        item["namespace"] = tool.namespace
    if text is not None:
        item["type"] = "custom_tool_call"
        item["input"] = text
    else:
        item["arguments"] = call.arguments
    return item


def aligned_logprobs(text: str, detail: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The entries of ``detail`` whose tokens spell ``text``; all of them when none does."""
    spelled = "".join(str(entry.get("token", "")) for entry in detail)
    start = spelled.rfind(text)
    if start < 0 or not text:
        return detail
    end, position, kept = start + len(text), 0, []
    for entry in detail:
        after = position + len(str(entry.get("token", "")))
        if position < end and after > start:
            kept.append(entry)
        position = after
    return kept
