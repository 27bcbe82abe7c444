"""An Anthropic Messages request, or one to count its tokens, as a canonical one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from bridle.proxy.dialects.fields import Fields, decode_object, invalid, writable
from bridle.proxy.dialects.functions import arguments_text, function_tool, schema_of
from bridle.proxy.dialects.thinking import apply_effort
from bridle.proxy.dialects.turns import Content, Transcript, image_part, joined, text_part
from bridle.proxy.wire.canonical import Request, Sampling, ToolCall, Wants

_READ: Final = frozenset(
    {"model", "messages", "system", "max_tokens", "stream", "temperature", "top_p", "top_k"}
    | {"stop_sequences", "tools", "tool_choice", "thinking", "output_config", "output_format"}
    | {"metadata", "cache_control", "betas", "service_tier", "chat_template_kwargs"}
)
_DOCUMENT_TEXT: Final = ("title", "context")


@dataclass(frozen=True, slots=True)
class MessagesContext:
    """What others may want to know of the request."""

    user_id: str | None
    """``metadata.user_id``: Claude Code puts its session there."""


def parse(body: bytes, *, counting: bool) -> Request:
    """``counting`` requests have no ``max_tokens``. Raises ``ApiError``
    (400) naming the field."""
    fields = decode_object(body)
    transcript = Transcript()
    _add_system(fields, transcript)
    _add_messages(fields, transcript)
    tools = _tools(fields, transcript)
    tool_choice, parallel = _tool_choice(fields, tools, transcript)
    extra, template_kwargs = _thinking(fields, transcript)
    extra.update(_prefill(transcript))
    metadata = fields.child("metadata")
    for name, value in fields.data.items():
        if value is not None and name not in _READ:
            transcript.note("field_dropped", name[:64])
    return Request(
        dialect="messages",
        model=fields.need_string("model"),
        messages=transcript.messages,
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=parallel,
        response_format=_response_format(fields),
        sampling=_sampling(fields, counting),
        stream=bool(fields.boolean("stream")),
        wants=Wants(stream_usage=True),
        template_kwargs=template_kwargs,
        extra=extra,
        context=MessagesContext(user_id=metadata.string("user_id") if metadata else None),
        notes=transcript.notes,
    )


def _add_system(fields: Fields, transcript: Transcript) -> None:
    system = fields.raw("system")
    if system is None:
        return
    if isinstance(system, str):
        transcript.system(system)
        return
    blocks = fields.objects("system")
    if blocks:
        parts = [part for block in blocks for part in _content_block(block, transcript)]
        transcript.system(joined(parts))


def _add_messages(fields: Fields, transcript: Transcript) -> None:
    messages = fields.objects("messages")
    if not messages:
        raise invalid("messages", "must be a non-empty list")
    for message in messages:
        role = message.need_string("role")
        content = message.raw("content")
        if content is None:
            raise invalid(message.path("content"), "is required")
        blocks = (
            [Fields({"type": "text", "text": content}, message.path("content"))]
            if isinstance(content, str)
            else message.objects("content")
        )
        if role == "user":
            _add_user(blocks, transcript)
        elif role == "assistant":
            _add_assistant(blocks, transcript)
        elif role == "system":
            parts = [part for block in blocks for part in _content_block(block, transcript)]
            transcript.system(joined(parts))
        else:
            raise invalid(message.path("role"), "must be user, assistant or system")


def _add_user(blocks: list[Fields], transcript: Transcript) -> None:
    """Tool results become tool messages; what stands between them, user messages; in order."""
    parts: list[dict[str, Any]] = []
    told = False
    for block in blocks:
        if block.need_string("type") == "tool_result":
            if parts:
                transcript.user(joined(parts))
                parts = []
            transcript.tool(block.need_string("tool_use_id"), _tool_result(block, transcript))
            told = True
        else:
            parts.extend(_content_block(block, transcript))
    if parts or not told:
        transcript.user(joined(parts))


def _tool_result(block: Fields, transcript: Transcript) -> Content:
    failed = block.boolean("is_error")
    content = block.raw("content")
    if content is None or isinstance(content, str):
        text: Content = content or ""
    else:
        inner = block.objects("content")
        text = joined([part for item in inner for part in _content_block(item, transcript)])
    if failed:
        transcript.note("tool_error_flag")
        return text or "error"
    return text


def _add_assistant(blocks: list[Fields], transcript: Transcript) -> None:
    ids = [value for block in blocks for value in _ids(block)]
    turn = transcript.turn(*ids, new_text=True)
    for block in blocks:
        kind = block.need_string("type")
        if kind == "text":
            turn.text.append(block.need_string("text"))
        elif kind == "thinking":
            turn.reasoning.append(block.string("thinking") or "")
            turn.anchor(block.string("signature"))
        elif kind == "redacted_thinking":
            turn.anchor(block.string("data"))
        elif kind == "tool_use":
            turn.tool_calls.append(_tool_use(block))
        else:
            transcript.note("block_dropped", kind[:64])


def _ids(block: Fields) -> list[str | None]:
    return [block.string(name) for name in ("id", "signature", "data") if block.raw(name)]


def _tool_use(block: Fields) -> ToolCall:
    arguments = arguments_text(block.raw("input"), block.path("input"))
    return ToolCall(block.need_string("id"), block.need_string("name"), arguments)


def _content_block(block: Fields, transcript: Transcript) -> list[dict[str, Any]]:
    """A text, image, document or search result as chat parts; others are dropped and noted."""
    kind = block.need_string("type")
    if kind == "text":
        return [text_part(block.need_string("text"))]
    if kind == "image":
        return _image(block, transcript)
    if kind == "document":
        return _document(block, transcript)
    if kind == "search_result":
        heading = [block.string("title"), block.string("source")]
        parts = [text_part(text) for text in heading if text]
        for inner in block.objects("content"):
            parts.extend(_content_block(inner, transcript))
        return parts
    if kind == "tool_reference":
        return [text_part(block.need_string("tool_name"))]
    transcript.note("block_dropped", kind[:64])
    return []


def _image(block: Fields, transcript: Transcript) -> list[dict[str, Any]]:
    source = block.child("source")
    if source is None:
        raise invalid(block.path("source"), "is required")
    kind = source.need_string("type")
    if kind == "base64":
        media_type, data = source.need_string("media_type"), source.need_string("data")
        return [image_part(f"data:{media_type};base64,{data}")]
    if kind == "url":
        return [image_part(source.need_string("url"))]
    transcript.note("block_dropped", f"image from {kind[:32]}")
    return []


def _document(block: Fields, transcript: Transcript) -> list[dict[str, Any]]:
    source = block.child("source")
    if source is None:
        raise invalid(block.path("source"), "is required")
    heading = [text for name in _DOCUMENT_TEXT if (text := block.string(name))]
    parts = [text_part(text) for text in heading]
    kind = source.need_string("type")
    if kind == "text":
        return [*parts, text_part(source.need_string("data"))]
    if kind == "content" and isinstance(source.raw("content"), str):
        return [*parts, text_part(source.need_string("content"))]
    if kind == "content":
        for inner in source.objects("content"):
            parts.extend(_content_block(inner, transcript))
        return parts
    transcript.note("block_dropped", f"document from {kind[:32]}")
    return parts


def _tools(fields: Fields, transcript: Transcript) -> tuple[dict[str, Any], ...]:
    tools = []
    for tool in fields.objects("tools"):
        kind = tool.string("type") or "custom"
        if kind != "custom":
            transcript.note("tool_dropped", kind[:64])
            continue
        if tool.boolean("defer_loading"):
            transcript.note("defer_loading_ignored")
        if tool.raw("input_examples"):
            transcript.note("field_dropped", "tools.input_examples")
        tools.append(
            function_tool(
                tool.need_string("name"),
                tool.string("description"),
                schema_of(tool, "input_schema"),
                strict=bool(tool.boolean("strict")),
            )
        )
    return tuple(tools)


def _tool_choice(
    fields: Fields, tools: tuple[dict[str, Any], ...], transcript: Transcript
) -> tuple[Any, bool | None]:
    """Chat's ``tool_choice`` and ``parallel_tool_calls``."""
    choice = fields.child("tool_choice")
    if choice is None:
        return None, None
    kind = choice.need_string("type")
    if kind not in ("auto", "any", "none", "tool"):
        raise invalid("tool_choice.type", "must be auto, any, tool or none")
    if not tools:
        if kind in ("any", "tool"):
            transcript.note("tool_choice_dropped", f"{kind} without usable tools")
        return None, None
    parallel = False if choice.boolean("disable_parallel_tool_use") else None
    if kind != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[kind], parallel
    name = choice.need_string("name")
    if all(tool["function"]["name"] != name for tool in tools):
        raise invalid("tool_choice.name", f"tool {name!r} is not among 'tools'")
    return {"type": "function", "function": {"name": name}}, parallel


def _thinking(
    fields: Fields, transcript: Transcript
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Fields to forward and template arguments for ``thinking`` and the effort."""
    thinking, output = fields.child("thinking"), fields.child("output_config")
    given = fields.child("chat_template_kwargs")
    kwargs = writable(given.data, given.where) if given else None
    effort = output.string("effort") if output else None
    kind = thinking.need_string("type") if thinking else None
    if kind == "disabled":
        return apply_effort("none", kwargs, transcript)
    if thinking is not None and thinking.integer("budget_tokens") is not None:
        transcript.note("field_dropped", "thinking.budget_tokens")
    return apply_effort(effort, kwargs, transcript)


def _response_format(fields: Fields) -> dict[str, Any] | None:
    output = fields.child("output_config")
    form = (output.child("format") if output else None) or fields.child("output_format")
    if form is None:
        return None
    if form.need_string("type") != "json_schema":
        raise invalid(form.path("type"), "must be json_schema")
    schema = form.child("schema")
    if schema is None:
        raise invalid(form.path("schema"), "is required")
    wanted = {"name": "output", "schema": writable(schema.data, schema.where)}
    return {"type": "json_schema", "json_schema": wanted}


def _sampling(fields: Fields, counting: bool) -> Sampling:
    max_tokens = fields.integer("max_tokens")
    if max_tokens is None and not counting:
        raise invalid("max_tokens", "Field required")
    if max_tokens is not None and max_tokens < 1:
        raise invalid("max_tokens", "must be at least 1")
    return Sampling(
        temperature=fields.number("temperature"),
        top_p=fields.number("top_p"),
        top_k=fields.integer("top_k"),
        max_tokens=max_tokens,
        stop=fields.strings("stop_sequences"),
    )


def _prefill(transcript: Transcript) -> dict[str, Any]:
    """A conversation that ends in assistant text asks for its continuation."""
    last = transcript.messages[-1]
    if last.role != "assistant" or last.tool_calls or not last.content:
        return {}
    transcript.note("prefill")
    return {"continue_final_message": True, "add_generation_prompt": False}
