"""An Anthropic Messages request, or one to count its tokens, as a canonical one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal

import msgspec

from bridle.proxy.dialects.body import (
    Integral,
    Json,
    convert,
    decode,
    invalid,
    read_on,
    sampling,
    type_of,
    unknown,
)
from bridle.proxy.dialects.functions import function_tool, json_schema_format, named_function
from bridle.proxy.dialects.messages.history import (
    AnthropicMessage,
    add_messages,
    content_of,
)
from bridle.proxy.dialects.messages.thread import Thread, continued_message
from bridle.proxy.dialects.thinking import apply_effort
from bridle.proxy.dialects.transcript import Transcript
from bridle.proxy.dialects.unsupported import Unsupported, refuse, refuse_kind
from bridle.proxy.wire.canonical import Message, Request, Wants
from bridle.proxy.wire.histories import Known, Parsed, Reading


class _ToolChoice(msgspec.Struct, gc=False):
    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Thinking(msgspec.Struct, gc=False):
    type: str
    budget_tokens: Integral | None = None


class _Format(msgspec.Struct, gc=False):
    type: Literal["json_schema"]
    schema: Json


class _Output(msgspec.Struct, gc=False):
    effort: str | None = None
    format: _Format | None = None


class _Body(msgspec.Struct, gc=False):
    model: str
    messages: list[AnthropicMessage]
    system: str | list[Json] | None = None
    max_tokens: Integral | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integral | None = None
    stop: str | list[str] | None = msgspec.field(default=None, name="stop_sequences")
    tools: list[Json] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None
    output_config: _Output | None = None
    output_format: _Format | None = None
    chat_template_kwargs: Json | None = None
    thread: Thread | None = None


class _Tool(msgspec.Struct, gc=False):
    name: str
    description: str | None = None
    input_schema: Json | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    input_examples: Any = None


def _clears_thinking_alone(value: Any) -> bool:
    """Return whether a ``context_management`` clears nothing but thinking.

    Claude Code sends such a one; here the template and the setting ``continuation`` decide about
    thinking.
    """
    edits = value.get("edits") if isinstance(value, dict) else None
    return all(
        isinstance(edit, dict) and str(edit.get("type")).startswith("clear_thinking")
        for edit in edits or ()
    )


REFUSED: Final[Mapping[str, Unsupported]] = {
    "compaction": Unsupported("ask for the summary in a user message"),
    "container": Unsupported(
        "provider-run containers and their skills do not exist here, leave it out"
    ),
    "context_management": Unsupported(
        "edit 'messages' before they are sent", harmless=_clears_thinking_alone
    ),
    "mcp_servers": Unsupported("connect to the servers and send their tools as 'tools'"),
}
"""Fields that carry history or tools, or change what the model is asked."""
REFUSED_TOOLS: Final[Mapping[str, str]] = {
    "mcp_toolset": "connect to the server and send its tools as 'tools'",
}
_WITHOUT_EFFECT: Final = frozenset({"metadata", "cache_control", "betas", "service_tier"})
_KNOWN: Final = frozenset(_Body.__struct_encode_fields__) | _WITHOUT_EFFECT
_CHOICES: Final[Mapping[str, str]] = {"auto": "auto", "any": "required", "none": "none"}


def parse(body: bytes, path: Mapping[str, str], query: Mapping[str, str]) -> Request:
    """See :data:`bridle.proxy.wire.canonical.Parse`."""
    return _limited(parse_count(body, path, query))


def parse_on(
    body: bytes, path: Mapping[str, str], query: Mapping[str, str], known: Known
) -> Parsed:
    """See :data:`bridle.proxy.wire.histories.ParseOn`."""
    parsed = read_on(body, "messages", known, partial(_request, None))
    _limited(parsed.request)
    return parsed


def _limited(request: Request) -> Request:
    if request.sampling.max_tokens is None:
        raise invalid("max_tokens", "Field required")
    return request


def parse_count(body: bytes, path: Mapping[str, str], query: Mapping[str, str]) -> Request:
    """Parse a request to count tokens.

    It is like a request of :func:`parse` but needs no ``max_tokens``.
    """
    return _request(None, decode(body), Reading())


def _request(thread_tools: tuple[Json, ...] | None, fields: Json, reading: Reading) -> Request:
    """Return the request of a body with these ``fields``.

    ``thread_tools`` are the tools of the thread that the request continues; ``None`` before they
    are known. Raise :class:`ApiError` (400).
    """
    wire = convert(fields, _Body)
    refuse(fields, REFUSED)
    previous = continued_message(wire.thread, fields)
    if not wire.messages:
        raise invalid("messages", "must not be empty")
    transcript = Transcript()
    if wire.system is not None and wire.system != []:
        transcript.system(content_of(wire.system, "system", transcript))
    transcript.extend(reading.over(wire.messages, Transcript(), add_messages))
    tools = thread_tools or _tools(wire.tools or (), transcript)
    if wire.max_tokens is not None and wire.max_tokens < 1:
        raise invalid("max_tokens", "must be at least 1")
    tool_choice, parallel = _tool_choice(wire.tool_choice, tools, transcript)
    extra, template_kwargs = _thinking(wire, transcript)
    extra.update(_prefill(transcript))
    for name in unknown(fields, _KNOWN):
        transcript.note("field_dropped", name[:64])
    return Request(
        dialect="messages",
        model=wire.model,
        messages=transcript.messages,
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=parallel,
        response_format=_response_format(wire),
        sampling=sampling(wire),
        stream=bool(wire.stream),
        wants=Wants(stream_usage=True),
        template_kwargs=template_kwargs,
        extra=extra,
        previous_response_id=previous,
        notes=transcript.notes,
    )


def with_history(body: bytes, history: Sequence[Message], tools: tuple[Json, ...]) -> Request:
    """Return the request in ``body`` after the conversation that its thread holds.

    ``history`` begins with the instructions and ends with the reply that is continued.
    """
    request = _request(tools, decode(body), Reading())
    return msgspec.structs.replace(request, messages=(*history, *request.messages))


def _tools(given: list[Json] | tuple[()], transcript: Transcript) -> tuple[Json, ...]:
    tools = []
    for position, wire in enumerate(given):
        field = f"tools[{position}]"
        kind = type_of(wire, field) if wire.get("type") else "custom"
        if kind != "custom":
            refuse_kind(kind, REFUSED_TOOLS, field)
            transcript.note("tool_dropped", kind[:64])
            continue
        tool = convert(wire, _Tool, field)
        if tool.defer_loading:
            transcript.note("defer_loading_ignored")
        if tool.input_examples:
            transcript.note("field_dropped", "tools.input_examples")
        schema = f"{field}.input_schema"
        tools.append(
            function_tool(
                tool.name, tool.description, tool.input_schema, schema, strict=tool.strict
            )
        )
    return tuple(tools)


def _tool_choice(
    choice: _ToolChoice | None, tools: tuple[Json, ...], transcript: Transcript
) -> tuple[Any, bool | None]:
    """Return ``tool_choice`` and ``parallel_tool_calls`` in chat shape."""
    if choice is None:
        return None, None
    if not tools:
        if choice.type in ("any", "tool"):
            transcript.note("tool_choice_dropped", f"{choice.type} without usable tools")
        return None, None
    parallel = False if choice.disable_parallel_tool_use else None
    if choice.type != "tool":
        return _CHOICES[choice.type], parallel
    if choice.name is None:
        raise invalid("tool_choice.name", "Field required")
    if all(tool["function"]["name"] != choice.name for tool in tools):
        raise invalid("tool_choice.name", f"tool {choice.name!r} is not among 'tools'")
    return named_function(choice.name), parallel


def _thinking(wire: _Body, transcript: Transcript) -> tuple[Json, Json | None]:
    """Return the fields to forward and the template arguments for ``thinking`` and the effort."""
    thinking = wire.thinking
    effort = wire.output_config.effort if wire.output_config else None
    if thinking is not None and thinking.type == "disabled":
        effort = "none"
    elif thinking is not None and thinking.budget_tokens is not None:
        transcript.note("field_dropped", "thinking.budget_tokens")
    return apply_effort(effort, wire.chat_template_kwargs, transcript)


def _response_format(wire: _Body) -> Json | None:
    if wire.output_config is not None and (form := wire.output_config.format) is not None:
        return json_schema_format(form.schema, "output_config.format.schema")
    if wire.output_format is not None:
        return json_schema_format(wire.output_format.schema, "output_format.schema")
    return None


def _prefill(transcript: Transcript) -> Json:
    """Return the fields that make the reply continue a conversation that ends in assistant text."""
    last = transcript.messages[-1]
    if last.role != "assistant" or last.tool_calls or not last.content:
        return {}
    transcript.note("prefill")
    return {"continue_final_message": True, "add_generation_prompt": False}
