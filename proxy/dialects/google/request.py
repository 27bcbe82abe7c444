"""A Gemini request (generate, stream or count) as a canonical one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Final

import msgspec

from bridle.proxy.dialects.body import (
    Integral,
    Json,
    convert,
    decode,
    integer,
    invalid,
    read_on,
    sampling,
    strings,
    unknown,
)
from bridle.proxy.dialects.functions import function_tool, json_schema_format, named_function
from bridle.proxy.dialects.google.history import contents_of, instruction_content
from bridle.proxy.dialects.google.reply import JSON_ARRAY
from bridle.proxy.dialects.google.schema import camel_keys, google, json_schema
from bridle.proxy.dialects.thinking import apply_effort
from bridle.proxy.dialects.transcript import Transcript
from bridle.proxy.dialects.unsupported import Unsupported, refuse, refuse_kind
from bridle.proxy.wire.canonical import Request, Wants
from bridle.proxy.wire.histories import Known, Parsed, Reading

GENERATE: Final = "generateContent"
STREAM: Final = "streamGenerateContent"
COUNT: Final = "countTokens"
METHODS: Final = frozenset({GENERATE, STREAM, COUNT})


class _Body(msgspec.Struct, rename="camel", gc=False):
    contents: str | Json | list[Json] | None = None
    system_instruction: str | Json | None = None
    tools: list[Json] | None = None
    tool_config: Json | None = None
    generation_config: Json | None = None
    model: str | None = None
    generate_content_request: Json | None = None


class _Tool(msgspec.Struct, rename="camel", gc=False):
    function_declarations: list[Json] | None = None


class _Declaration(msgspec.Struct, rename="camel", gc=False):
    name: str
    description: str | None = None
    parameters: Json | None = None
    parameters_json_schema: Json | None = None


class _ToolConfig(msgspec.Struct, rename="camel", gc=False):
    function_calling_config: Json | None = None


class _Calling(msgspec.Struct, rename="camel", gc=False):
    mode: str | None = None
    allowed_function_names: str | list[str] | None = None


class _Config(msgspec.Struct, rename="camel", gc=False):
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integral | None = None
    max_tokens: Integral | None = msgspec.field(default=None, name="maxOutputTokens")
    stop: str | list[str] | None = msgspec.field(default=None, name="stopSequences")
    response_mime_type: str | None = None
    response_schema: Json | None = None
    response_json_schema: Json | None = None
    seed: Integral | None = None
    thinking_config: Json | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=8)] | None = msgspec.field(
        default=None, name="candidateCount"
    )
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_logprobs: bool | None = None
    logprobs: Integral | None = None


class _Thinking(msgspec.Struct, rename="camel", gc=False):
    thinking_level: str | None = None
    thinking_budget: Integral | None = None
    include_thoughts: bool | None = None


def _is_text_alone(value: Any) -> bool:
    return isinstance(value, list) and all(str(one).upper() == "TEXT" for one in value)


REFUSED: Final[Mapping[str, Unsupported]] = {
    "cachedContent": Unsupported("send the content in 'contents'"),
}
"""Fields that carry history."""
REFUSED_CONFIG: Final[Mapping[str, Unsupported]] = {
    "responseModalities": Unsupported("ask for text alone", _is_text_alone),
}
"""Fields of ``generationConfig`` that ask for a reply which no engine gives."""
REFUSED_TOOLS: Final[Mapping[str, str]] = {
    "fileSearch": "send what the files say in 'contents'",
    "mcpServers": "connect to the servers and send their tools as 'functionDeclarations'",
    "retrieval": "send what is retrieved in 'contents'",
}
"""Tools that bring content or further tools which only the provider has."""
_KNOWN: Final = frozenset(_Body.__struct_encode_fields__)
_KNOWN_CONFIG: Final = frozenset(_Config.__struct_encode_fields__)
_NAMES: Final[Mapping[str, str]] = {
    "max_tokens": "maxOutputTokens",
    "top_p": "topP",
    "top_k": "topK",
    "presence_penalty": "presencePenalty",
    "frequency_penalty": "frequencyPenalty",
}


def parse(body: bytes, path: Mapping[str, str], query: Mapping[str, str]) -> Request:
    """See :data:`bridle.proxy.wire.canonical.Parse`; ``path`` holds ``model`` and ``method``."""
    _check_method(path)
    return _request(path, query, decode(body), Reading())


def parse_on(
    body: bytes, path: Mapping[str, str], query: Mapping[str, str], known: Known
) -> Parsed:
    """See :data:`bridle.proxy.wire.histories.ParseOn`."""
    _check_method(path)
    return read_on(body, "contents", known, partial(_request, path, query))


def _check_method(path: Mapping[str, str]) -> None:
    if path.get("method", GENERATE) not in METHODS:
        raise invalid("method", f"must be one of {', '.join(sorted(METHODS))}")


def _request(
    path: Mapping[str, str], query: Mapping[str, str], given: Json, reading: Reading
) -> Request:
    """Return the request of a body with the ``given`` fields. Raise :class:`ApiError` (400)."""
    method, fields = path.get("method", GENERATE), camel_keys(given)
    wire = convert(fields, _Body)
    if method == COUNT and wire.generate_content_request is not None:
        fields = camel_keys(wire.generate_content_request)
        wire = convert(fields, _Body, "generateContentRequest")
    refuse(fields, REFUSED)
    transcript = Transcript()
    if wire.system_instruction is not None:
        transcript.system(instruction_content(wire.system_instruction, transcript))
    transcript.extend(contents_of(wire.contents, reading))
    settings = camel_keys(wire.generation_config or {})
    refuse(settings, REFUSED_CONFIG, "generationConfig.")
    config = convert(settings, _Config, "generationConfig")
    tools, tool_choice = _tool_choice(wire.tool_config, _tools(wire, transcript), transcript)
    extra, template_kwargs, thoughts = _thinking(config, transcript)
    for name in (*unknown(fields, _KNOWN), *unknown(settings, _KNOWN_CONFIG)):
        transcript.note("field_dropped", name[:64])
    model = path.get("model") or wire.model
    if model is None:
        raise invalid("model", "Field required")
    return Request(
        dialect="google",
        model=model.removeprefix("models/"),
        messages=transcript.messages,
        tools=tools,
        tool_choice=tool_choice,
        response_format=_response_format(config, transcript),
        sampling=sampling(config, "generationConfig."),
        stream=method == STREAM,
        wants=Wants(
            logprobs=bool(config.response_logprobs),
            top_logprobs=_top_logprobs(config),
            stream_usage=True,
            reasoning=thoughts,
        ),
        own=None if query.get("alt") == "sse" else JSON_ARRAY,
        template_kwargs=template_kwargs,
        extra=extra,
        names=_NAMES,
        notes=transcript.notes,
    )


def _tools(wire: _Body, transcript: Transcript) -> tuple[Json, ...]:
    tools = []
    for position, given in enumerate(wire.tools or ()):
        named = camel_keys(given)
        for kind in named:
            if kind != "functionDeclarations":
                refuse_kind(kind, REFUSED_TOOLS, f"tools[{position}]")
                transcript.note("tool_dropped", kind[:64])
        declared = convert(named, _Tool, f"tools[{position}]").function_declarations or ()
        for index, declaration in enumerate(declared):
            tools.append(_tool(declaration, f"tools[{position}].functionDeclarations[{index}]"))
    return tuple(tools)


def _tool(given: Json, field: str) -> Json:
    tool = google(given, _Declaration, field)
    parameters, place = tool.parameters_json_schema, f"{field}.parametersJsonSchema"
    if parameters is None and tool.parameters is not None:
        place = f"{field}.parameters"
        parameters = json_schema(tool.parameters, place)
    return function_tool(tool.name, tool.description, parameters, place)


def _tool_choice(
    given: Json | None, tools: tuple[Json, ...], transcript: Transcript
) -> tuple[tuple[Json, ...], Any]:
    """Return the tools that may be called, and ``tool_choice`` in chat shape."""
    field = "toolConfig.functionCallingConfig"
    settings = google(given or {}, _ToolConfig, "toolConfig").function_calling_config or {}
    calling = google(settings, _Calling, field)
    mode = (calling.mode or "AUTO").upper()
    if not tools:
        if mode == "ANY":
            transcript.note("tool_choice_dropped", "ANY without usable tools")
        return tools, None
    if mode == "NONE":
        return tools, "none"
    if mode in ("AUTO", "MODE_UNSPECIFIED"):
        return tools, "auto" if calling.mode is not None else None
    if mode not in ("ANY", "VALIDATED"):
        raise invalid(f"{field}.mode", "must be AUTO, ANY, VALIDATED or NONE")
    allowed = strings(calling.allowed_function_names)
    if allowed:
        tools = tuple(tool for tool in tools if tool["function"]["name"] in allowed)
        if not tools:
            raise invalid(f"{field}.allowedFunctionNames", "names no declared function")
    if mode == "VALIDATED":
        return tools, "auto"
    if allowed and len(tools) == 1:
        return tools, named_function(tools[0]["function"]["name"])
    return tools, "required"


def _thinking(config: _Config, transcript: Transcript) -> tuple[Json, Json | None, bool]:
    """Return the fields to forward, the template arguments, and whether to show thoughts."""
    if config.thinking_config is None:
        return {}, None, False
    thinking = google(config.thinking_config, _Thinking, "generationConfig.thinkingConfig")
    level = thinking.thinking_level
    effort = level.lower() if level is not None and level != "THINKING_LEVEL_UNSPECIFIED" else None
    budget = thinking.thinking_budget
    if budget == 0:
        effort = "none"
    elif budget is not None and budget > 0:
        transcript.note("field_dropped", "thinkingConfig.thinkingBudget")
    return *apply_effort(effort, None, transcript), bool(thinking.include_thoughts)


def _response_format(config: _Config, transcript: Transcript) -> Json | None:
    mime_type = config.response_mime_type or "text/plain"
    schema, field = config.response_json_schema, "generationConfig.responseJsonSchema"
    if schema is None and config.response_schema is not None:
        field = "generationConfig.responseSchema"
        schema = json_schema(config.response_schema, field)
    if mime_type == "application/json":
        if schema is None:
            return {"type": "json_object"}
        return json_schema_format(schema, field)
    if mime_type != "text/plain" or schema is not None:
        transcript.note("field_dropped", f"response format {mime_type[:32]}")
    return None


def _top_logprobs(config: _Config) -> int:
    top = integer(config.logprobs, "generationConfig.logprobs")
    return top if top is not None and config.response_logprobs else 0
