"""The messages of a Messages request, whose contents are blocks, as canonical ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from bridle.proxy.dialects.body import Json, pick, type_of
from bridle.proxy.dialects.functions import arguments_text
from bridle.proxy.dialects.transcript import Content, Transcript, image_part, joined, text_part
from bridle.proxy.wire.canonical import ToolCall


class AnthropicMessage(msgspec.Struct, gc=False):
    """A message as the client wrote it."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Json]


class _Text(msgspec.Struct, gc=False):
    text: str


class _Image(msgspec.Struct, gc=False):
    source: Json


class _Document(msgspec.Struct, gc=False):
    source: Json
    title: str | None = None
    context: str | None = None


class _SearchResult(msgspec.Struct, gc=False):
    title: str | None = None
    source: str | None = None
    content: list[Json] | None = None


class _ToolReference(msgspec.Struct, gc=False):
    tool_name: str


class _ToolResult(msgspec.Struct, gc=False):
    tool_use_id: str
    content: str | list[Json] | None = None
    is_error: bool | None = None


class _Thinking(msgspec.Struct, gc=False):
    thinking: str | None = None
    signature: str | None = None


class _RedactedThinking(msgspec.Struct, gc=False):
    data: str | None = None


class _ToolUse(msgspec.Struct, gc=False):
    id: str
    name: str
    input: Any = None


class _Base64Source(msgspec.Struct, gc=False):
    media_type: str
    data: str


class _UrlSource(msgspec.Struct, gc=False):
    url: str


class _TextSource(msgspec.Struct, gc=False):
    data: str


class _ContentSource(msgspec.Struct, gc=False):
    content: str | list[Json] | None = None


_Part = _Text | _Image | _Document | _SearchResult | _ToolReference
_AssistantBlock = _Text | _Thinking | _RedactedThinking | _ToolUse

_PARTS: Final[Mapping[str, type[_Part]]] = {
    "text": _Text,
    "image": _Image,
    "document": _Document,
    "search_result": _SearchResult,
    "tool_reference": _ToolReference,
}
_ASSISTANT: Final[Mapping[str, type[_AssistantBlock]]] = {
    "text": _Text,
    "thinking": _Thinking,
    "redacted_thinking": _RedactedThinking,
    "tool_use": _ToolUse,
}
_RESULTS: Final = {"tool_result": _ToolResult}
_IMAGES: Final[Mapping[str, type[_Base64Source | _UrlSource]]] = {
    "base64": _Base64Source,
    "url": _UrlSource,
}
_DOCUMENTS: Final[Mapping[str, type[_TextSource | _ContentSource]]] = {
    "text": _TextSource,
    "content": _ContentSource,
}


def add_messages(messages: Sequence[AnthropicMessage], transcript: Transcript) -> None:
    """Adds the messages in their order. Raises ``ApiError`` (400) that names the field."""
    for position, message in enumerate(messages):
        field = f"messages[{position}].content"
        content = message.content
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if message.role == "user":
            _add_user(blocks, field, transcript)
        elif message.role == "assistant":
            _add_assistant(blocks, field, transcript)
        else:
            transcript.system(joined(content_parts(blocks, field, transcript)))


def content_parts(blocks: Sequence[Json], field: str, transcript: Transcript) -> list[Json]:
    """Text, image, document and search result blocks as chat parts; others are dropped with a
    note."""
    parts: list[Json] = []
    for index, block in enumerate(blocks):
        parts += _content_block(block, f"{field}[{index}]", transcript)
    return parts


def _add_user(blocks: Sequence[Json], field: str, transcript: Transcript) -> None:
    """Tool results become tool messages, the blocks between them user messages, in order."""
    parts: list[Json] = []
    has_result = False
    for index, block in enumerate(blocks):
        place = f"{field}[{index}]"
        result = pick(block, _RESULTS, place)
        if result is None:
            parts += _content_block(block, place, transcript)
            continue
        if parts:
            transcript.user(joined(parts))
            parts = []
        transcript.tool(result.tool_use_id, _tool_result(result, place, transcript))
        has_result = True
    if parts or not has_result:
        transcript.user(joined(parts))


def _tool_result(result: _ToolResult, field: str, transcript: Transcript) -> Content:
    content = _text_or_parts(result.content, f"{field}.content", transcript)
    if result.is_error:
        transcript.note("tool_error_flag")
        return content or "error"
    return content


def _text_or_parts(content: str | list[Json] | None, field: str, transcript: Transcript) -> Content:
    if isinstance(content, list):
        return joined(content_parts(content, field, transcript))
    return content or ""


def _add_assistant(blocks: Sequence[Json], field: str, transcript: Transcript) -> None:
    picked = [
        (block, pick(block, _ASSISTANT, f"{field}[{index}]")) for index, block in enumerate(blocks)
    ]
    turn = transcript.turn(*(_opaque(block) for _, block in picked), new_text=True)
    for index, (given, block) in enumerate(picked):
        match block:
            case _Text():
                turn.text.append(block.text)
            case _Thinking():
                turn.reasoning.append(block.thinking or "")
                turn.anchor(block.signature)
            case _RedactedThinking():
                turn.anchor(block.data)
            case _ToolUse():
                arguments = arguments_text(block.input, f"{field}[{index}].input")
                turn.tool_calls.append(ToolCall(block.id, block.name, arguments))
            case None:
                transcript.note("block_dropped", given["type"][:64])


def _opaque(block: _AssistantBlock | None) -> str | None:
    """The value in ``block`` that may name the call which made it."""
    match block:
        case _ToolUse():
            return block.id
        case _Thinking():
            return block.signature
        case _RedactedThinking():
            return block.data
        case _:
            return None


def _content_block(block: Json, field: str, transcript: Transcript) -> list[Json]:
    part = pick(block, _PARTS, field)
    match part:
        case _Text():
            return [text_part(part.text)]
        case _Image():
            return _image(part, field, transcript)
        case _Document():
            return _document(part, field, transcript)
        case _SearchResult():
            heading = [text_part(text) for text in (part.title, part.source) if text]
            return heading + content_parts(part.content or (), f"{field}.content", transcript)
        case _ToolReference():
            return [text_part(part.tool_name)]
        case None:
            transcript.note("block_dropped", block["type"][:64])
            return []


def _image(image: _Image, field: str, transcript: Transcript) -> list[Json]:
    source = pick(image.source, _IMAGES, f"{field}.source")
    match source:
        case _Base64Source():
            return [image_part(f"data:{source.media_type};base64,{source.data}")]
        case _UrlSource():
            return [image_part(source.url)]
        case None:
            transcript.note("block_dropped", f"image from {image.source['type'][:32]}")
            return []


def _document(document: _Document, field: str, transcript: Transcript) -> list[Json]:
    parts = [text_part(text) for text in (document.title, document.context) if text]
    source = pick(document.source, _DOCUMENTS, f"{field}.source")
    match source:
        case _TextSource():
            parts.append(text_part(source.data))
        case _ContentSource(content=str(text)):
            parts.append(text_part(text))
        case _ContentSource(content=list(blocks)):
            parts += content_parts(blocks, f"{field}.source.content", transcript)
        case _ContentSource():
            pass
        case None:
            kind = type_of(document.source, f"{field}.source")
            transcript.note("block_dropped", f"document from {kind[:32]}")
    return parts
