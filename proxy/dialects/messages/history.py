"""The messages of a Messages request, whose contents are blocks, as canonical ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from bridle.proxy.dialects.body import Json, convert, invalid, typed
from bridle.proxy.dialects.functions import arguments_text
from bridle.proxy.dialects.transcript import Content, Transcript, image_part, joined, text_part
from bridle.proxy.dialects.unsupported import Unsupported, as_text, refuse, refuse_kind
from bridle.proxy.wire.canonical import ToolCall


class AnthropicMessage(msgspec.Struct, gc=False):
    """A message as the client wrote it."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Json]


class _Block(msgspec.Struct, gc=False):
    """A content block of any type that is known."""

    text: str = ""
    id: str = ""
    name: str = ""
    tool_name: str = ""
    tool_use_id: str = ""
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    title: str | None = None
    context: str | None = None
    source: str | Json | None = None
    content: str | list[Json] | None = None
    is_error: bool | None = None
    input: Any = None


class _Source(msgspec.Struct, gc=False):
    """The source of an image or a document."""

    media_type: str = ""
    data: str = ""
    url: str = ""
    content: str | list[Json] | None = None


_Required = Mapping[str, tuple[str, ...]]
_BLOCKS: Final[_Required] = {
    "text": ("text",),
    "image": ("source",),
    "document": ("source",),
    "search_result": (),
    "tool_reference": ("tool_name",),
    "tool_result": ("tool_use_id",),
    "thinking": (),
    "redacted_thinking": (),
    "tool_use": ("id", "name"),
    "compaction": (),
}
_FILES: Final = "send its text, or an image of it, instead"
REFUSED: Final[Mapping[str, str]] = {
    "container_upload": _FILES,
    "tool_addition": "send the tools as 'tools' of a new conversation",
    "tool_removal": "send the tools as 'tools' of a new conversation",
}
"""Types of blocks that carry content or tools which are not available here."""
_OF_COMPACTION: Final[Mapping[str, Unsupported]] = {
    "tool_changes": Unsupported("send the tools as 'tools' of a new conversation")
}
_WITHOUT_MEANING: Final = frozenset({"fallback"})
"""Types of blocks that mean nothing to the model."""
_IMAGES: Final[_Required] = {"base64": ("media_type", "data"), "url": ("url",)}
_DOCUMENTS: Final[_Required] = {"text": ("data",), "content": ()}


def add_messages(transcript: Transcript, messages: Sequence[AnthropicMessage], first: int) -> None:
    """Add the messages in their order. Raise ``ApiError`` (400) that names the field.

    The first of them is ``messages[first]`` of the request.
    """
    for position, message in enumerate(messages, first):
        field = f"messages[{position}].content"
        content = message.content
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if message.role == "user":
            _add_user(blocks, field, transcript)
        elif message.role == "assistant":
            _add_assistant(blocks, field, transcript)
        else:
            transcript.system(content_of(blocks, field, transcript))


def content_of(given: str | Sequence[Json] | None, field: str, transcript: Transcript) -> Content:
    """Return a text, or blocks in chat shape.

    A block that has none becomes text or is dropped, with a note.
    """
    if given is None or isinstance(given, str):
        return given or ""
    return joined(_parts(given, field, transcript))


def _parts(blocks: Sequence[Json], field: str, transcript: Transcript) -> list[Json]:
    parts: list[Json] = []
    for index, given in enumerate(blocks):
        place = f"{field}[{index}]"
        kind, block = typed(given, _Block, _BLOCKS, place)
        parts += _chat_parts(kind, block, given, place, transcript)
    return parts


def _add_user(blocks: Sequence[Json], field: str, transcript: Transcript) -> None:
    """Add tool results as tool messages, and the blocks between them as user messages, in order."""
    parts: list[Json] = []
    has_result = False
    for index, given in enumerate(blocks):
        place = f"{field}[{index}]"
        kind, block = typed(given, _Block, _BLOCKS, place)
        if block is None or kind != "tool_result":
            parts += _chat_parts(kind, block, given, place, transcript)
            continue
        if parts:
            transcript.user(joined(parts))
            parts = []
        result = content_of(block.content, f"{place}.content", transcript)
        if block.is_error:
            transcript.note("tool_error_flag")
            result = result or "error"
        transcript.tool(block.tool_use_id, result)
        has_result = True
    if parts or not has_result:
        transcript.user(joined(parts))


def _add_assistant(given: Sequence[Json], field: str, transcript: Transcript) -> None:
    places = [f"{field}[{index}]" for index in range(len(given))]
    blocks = [
        typed(block, _Block, _BLOCKS, place) for block, place in zip(given, places, strict=True)
    ]
    ids = [block.id or block.signature or block.data for _, block in blocks if block is not None]
    turn = transcript.turn(*ids, new_text=True)
    for place, original, (kind, block) in zip(places, given, blocks, strict=True):
        if block is not None and kind == "text":
            turn.text.append(block.text)
        elif block is not None and kind == "thinking":
            turn.reasoning.append(block.thinking or "")
            turn.anchor(block.signature)
        elif block is not None and kind == "redacted_thinking":
            turn.anchor(block.data)
        elif block is not None and kind == "tool_use":
            arguments = arguments_text(block.input, f"{place}.input")
            turn.tool_calls.append(ToolCall(block.id, block.name, arguments))
        else:
            parts = _chat_parts(kind, block, original, place, transcript)
            turn.text.extend(part["text"] for part in parts if part["type"] == "text")


def _chat_parts(
    kind: str, block: _Block | None, given: Json, field: str, transcript: Transcript
) -> list[Json]:
    """Return a block as chat parts.

    One of an unknown type becomes its JSON text, with a note: history is not dropped. Raise
    ``ApiError`` (400) for content that cannot be read here.
    """
    if block is None:
        refuse_kind(kind, REFUSED, field)
        if kind in _WITHOUT_MEANING:
            transcript.note("block_dropped", kind)
            return []
        transcript.note("block_as_text", kind[:64])
        return [text_part(as_text(kind, given, field))]
    if kind == "text":
        return [text_part(block.text)]
    if kind == "image":
        return _image(block, field)
    if kind == "document":
        return _document(block, field, transcript)
    if kind == "search_result":
        heading = [text for text in (block.title, block.source) if text and isinstance(text, str)]
        inner = block.content if isinstance(block.content, list) else ()
        return [*map(text_part, heading), *_parts(inner, f"{field}.content", transcript)]
    if kind == "tool_reference":
        return [text_part(block.tool_name)]
    if kind == "compaction":
        return _summary(block, given, field)
    transcript.note("block_as_text", kind)
    return [text_part(as_text(kind, given, field))]


def _summary(block: _Block, given: Json, field: str) -> list[Json]:
    """Return the summary that stands for earlier messages.

    Return nothing if the compaction had failed.
    """
    refuse(given, _OF_COMPACTION, f"{field}.")
    return [text_part(block.content)] if block.content and isinstance(block.content, str) else []


def _image(block: _Block, field: str) -> list[Json]:
    field = f"{field}.source"
    kind, source = typed(convert(block.source, Json, field), _Source, _IMAGES, field)
    if source is None:
        raise invalid(field, f"an image from {kind[:32]} cannot be read; send its data or URL")
    return [image_part(source.url or f"data:{source.media_type};base64,{source.data}")]


def _document(block: _Block, field: str, transcript: Transcript) -> list[Json]:
    field = f"{field}.source"
    parts = [text_part(text) for text in (block.title, block.context) if text]
    kind, source = typed(convert(block.source, Json, field), _Source, _DOCUMENTS, field)
    if source is None:
        raise invalid(field, f"a document from {kind[:32]} cannot be read; {_FILES}")
    if kind == "text":
        parts.append(text_part(source.data))
    elif isinstance(source.content, str):
        parts.append(text_part(source.content))
    else:
        parts += _parts(source.content or (), f"{field}.content", transcript)
    return parts
