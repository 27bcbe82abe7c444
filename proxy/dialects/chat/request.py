"""A chat completions request as a canonical one; legacy completions share its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

from bridle.proxy.dialects.body import (
    Count,
    Int64,
    Json,
    convert,
    decode,
    invalid,
    read_on,
    sampling,
    writable,
)
from bridle.proxy.dialects.chat.history import ChatMessage, Conversation
from bridle.proxy.dialects.unsupported import Unsupported, refuse, refuse_kind
from bridle.proxy.wire.canonical import Request, Wants
from bridle.proxy.wire.histories import Known, Parsed, Reading
from bridle.store.records import Note

FORWARDED: Final = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "ignore_eos",
        "logit_bias",
        "min_tokens",
        "mm_processor_kwargs",
        "stop_token_ids",
        "structured_outputs",
        "truncate_prompt_tokens",
        "user",
    }
)
"""Fields that engines know and that change nothing about what can be recorded."""


class AskedUsage(msgspec.Struct, gc=False):
    """The field ``stream_options``."""

    include_usage: bool | None = None


class Parameters(msgspec.Struct, gc=False):
    """The fields that chat and legacy completions have in common."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    max_tokens: Int64 | None = None
    stop: str | list[str] | None = None
    seed: Int64 | None = None
    n: Count | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stream: bool | None = None
    stream_options: AskedUsage | None = None
    return_token_ids: bool | None = None


class _Body(Parameters, kw_only=True, gc=False):
    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    response_format: Json | None = None
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=64)] | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: Json | None = None


class _Function(msgspec.Struct, gc=False):
    name: str | None = None


class _AllowedTool(msgspec.Struct, gc=False):
    function: _Function | None = None


class _Allowed(msgspec.Struct, gc=False):
    mode: str
    tools: list[_AllowedTool] | None = None


class _AllowedTools(msgspec.Struct, gc=False):
    """A ``tool_choice`` of the type ``allowed_tools``."""

    allowed_tools: _Allowed


def _is_text_alone(value: Any) -> bool:
    return bool(value == ["text"])


REFUSED: Final[Mapping[str, Unsupported]] = {
    "functions": Unsupported("send them as 'tools'"),
    "function_call": Unsupported("send 'tools' and 'tool_choice'", lambda value: value == "none"),
    "chat_template": Unsupported("serve the model with it (vLLM: --chat-template FILE)"),
    "documents": Unsupported("send their text in a message"),
    "modalities": Unsupported("ask for text alone", _is_text_alone),
    "web_search_options": Unsupported("send a search tool of your own as a function"),
}
"""Fields that carry history or tools, or change what the model is asked."""
REFUSED_TOOLS: Final[Mapping[str, str]] = {
    "custom": "send it as a function with one string argument",
    "mcp": "connect to the server and send its tools as functions",
}
_KNOWN: Final = frozenset(_Body.__struct_fields__)
_FORWARDED: Final = FORWARDED | {
    "add_generation_prompt",
    "continue_final_message",
    "reasoning_effort",
    "thinking_token_budget",
}
_LATER_NAMES: Final[Mapping[str, str]] = {"max_tokens": "max_completion_tokens"}

Tools = tuple[Json, ...]


def parse(body: bytes, path: Mapping[str, str], query: Mapping[str, str]) -> Request:
    """See :data:`bridle.proxy.wire.canonical.Parse`."""
    return _request(decode(body), Reading())


def parse_on(
    body: bytes, path: Mapping[str, str], query: Mapping[str, str], known: Known
) -> Parsed:
    """See :data:`bridle.proxy.wire.histories.ParseOn`."""
    return read_on(body, "messages", known, _request)


def _request(fields: Json, reading: Reading) -> Request:
    """Return the request of a body with these ``fields``. Raise :class:`ApiError` (400)."""
    refuse(fields, REFUSED)
    wire = convert(fields, _Body)
    extra, notes = beyond(fields, _KNOWN, _FORWARDED)
    if wire.top_logprobs and not wire.logprobs:
        raise invalid("top_logprobs", "'logprobs' must be true to ask for them")
    tools, tool_choice = _tools(wire, notes) if wire.tools or wire.tool_choice else ((), None)
    if wire.response_format is not None:
        writable(wire.response_format, "response_format")
    if wire.chat_template_kwargs is not None:
        writable(wire.chat_template_kwargs, "chat_template_kwargs")
    names: Mapping[str, str] = {}
    if wire.max_completion_tokens is not None:
        wire.max_tokens, names = wire.max_completion_tokens, _LATER_NAMES
    talk = reading.over(wire.messages, Conversation(), Conversation.add)
    return Request(
        dialect="chat",
        model=wire.model,
        messages=tuple(talk.messages),
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=wire.parallel_tool_calls,
        response_format=wire.response_format,
        sampling=sampling(wire),
        stream=bool(wire.stream),
        wants=Wants(
            logprobs=bool(wire.logprobs),
            top_logprobs=wire.top_logprobs or 0,
            token_ids=bool(wire.return_token_ids),
            stream_usage=bool(wire.stream_options and wire.stream_options.include_usage),
            reasoning=wire.include_reasoning is not False,
        ),
        template_kwargs=wire.chat_template_kwargs,
        extra=extra,
        names=names,
        notes=tuple(notes | talk.notes),
    )


def beyond(
    fields: Json, known: frozenset[str], forwarded: frozenset[str]
) -> tuple[Json, dict[Note, None]]:
    """Return the fields beyond the ``known`` ones to forward, and a note for each other one."""
    extra: Json = {}
    notes: dict[Note, None] = {}
    for name, value in fields.items():
        if value is None or name in known:
            continue
        if name in forwarded:
            extra[name] = value
        else:
            notes[Note("field_dropped", name)] = None
    return extra, notes


def _tools(wire: _Body, notes: dict[Note, None]) -> tuple[Tools, Any]:
    """Return the tools that may be called, and the engine's ``tool_choice``."""
    kept: list[Json] = []
    for position, tool in enumerate(wire.tools or ()):
        kind = tool.get("type", "function")
        if kind != "function":
            refuse_kind(str(kind), REFUSED_TOOLS, f"tools[{position}]")
            notes[Note("tool_dropped", str(kind))] = None
            continue
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"tools[{position}].function", "must be an object that has a name")
        kept.append({"type": "function", "function": function})
    tools, choice = tuple(kept), wire.tool_choice
    writable(tools, "tools")
    if isinstance(choice, dict):
        writable(choice, "tool_choice")
        kind = choice.get("type")
        if kind == "allowed_tools":
            return _allowed(convert(choice, _AllowedTools, "tool_choice"), tools, notes)
        if kind != "function":
            notes[Note("tool_choice_dropped", str(kind))] = None
            return tools, None
    return tools, choice


def _allowed(
    choice: _AllowedTools, tools: Tools, notes: dict[Note, None]
) -> tuple[Tools, str | None]:
    allowed = choice.allowed_tools
    if allowed.mode not in ("auto", "required"):
        raise invalid("tool_choice.allowed_tools.mode", "must be 'auto' or 'required'")
    names = {tool.function.name for tool in allowed.tools or () if tool.function is not None}
    tools = tuple(tool for tool in tools if tool["function"]["name"] in names)
    if tools:
        return tools, allowed.mode
    if allowed.mode == "required":
        notes[Note("tool_choice_dropped", "required without usable tools")] = None
    return tools, None
