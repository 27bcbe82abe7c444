"""A Gemini request (generate, stream or count) as a canonical one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from bridle.proxy.dialects.fields import Fields, decode_object, invalid, writable
from bridle.proxy.dialects.functions import function_tool
from bridle.proxy.dialects.google.contents import add_contents, instruction_text
from bridle.proxy.dialects.google.schema import json_schema, named
from bridle.proxy.dialects.thinking import apply_effort
from bridle.proxy.dialects.turns import Transcript
from bridle.proxy.wire.canonical import Request, Sampling, Wants

GENERATE: Final = "generateContent"
STREAM: Final = "streamGenerateContent"
COUNT: Final = "countTokens"
METHODS: Final = frozenset({GENERATE, STREAM, COUNT})

_READ: Final = frozenset(
    {"contents", "systemInstruction", "tools", "toolConfig", "generationConfig", "model"}
    | {"generateContentRequest"}
)
_READ_CONFIG: Final = frozenset(
    {"temperature", "topP", "topK", "maxOutputTokens", "stopSequences", "responseMimeType"}
    | {"responseSchema", "responseJsonSchema", "seed", "thinkingConfig", "candidateCount"}
    | {"presencePenalty", "frequencyPenalty", "responseLogprobs", "logprobs"}
)
_NAMES: Final[Mapping[str, str]] = {
    "max_tokens": "maxOutputTokens",
    "top_p": "topP",
    "top_k": "topK",
    "presence_penalty": "presencePenalty",
    "frequency_penalty": "frequencyPenalty",
}


@dataclass(frozen=True, slots=True)
class GoogleContext:
    """What the reply needs to know of the request."""

    sse: bool
    """Events, or (without ``alt=sse``) one JSON array that grows."""
    thoughts: bool
    """The client asked to see the model's thoughts."""


def parse(body: bytes, path: Mapping[str, str], query: Mapping[str, str]) -> Request:
    """``path`` holds ``model`` and ``method``. Raises ``ApiError`` (400)
    naming the field."""
    method = path.get("method", GENERATE)
    if method not in METHODS:
        raise invalid("method", f"must be one of {', '.join(sorted(METHODS))}")
    fields = named(decode_object(body))
    if method == COUNT and (inner := fields.child("generateContentRequest")) is not None:
        fields = named(inner)
    if fields.raw("cachedContent") is not None:
        raise invalid("cachedContent", "is not supported; send the content in 'contents'")
    transcript = Transcript()
    if (instruction := instruction_text(fields, transcript)) is not None:
        transcript.system(instruction)
    add_contents(fields, transcript)
    config = named(fields.child("generationConfig") or Fields({}, "generationConfig"))
    tools = _tools(fields, transcript)
    tools, tool_choice = _tool_choice(fields, tools, transcript)
    extra, template_kwargs, thoughts = _thinking(config, transcript)
    _note_unused(fields, _READ, transcript)
    _note_unused(config, _READ_CONFIG, transcript)
    model = path.get("model") or fields.need_string("model")
    return Request(
        dialect="google",
        model=model.removeprefix("models/"),
        messages=transcript.messages,
        tools=tools,
        tool_choice=tool_choice,
        response_format=_response_format(config, transcript),
        sampling=_sampling(config),
        stream=method == STREAM,
        wants=_wants(config),
        template_kwargs=template_kwargs,
        extra=extra,
        context=GoogleContext(sse=query.get("alt") == "sse", thoughts=thoughts),
        names=_NAMES,
        notes=transcript.notes,
    )


def _tools(fields: Fields, transcript: Transcript) -> tuple[dict[str, Any], ...]:
    tools = []
    for tool in map(named, fields.objects("tools")):
        for kind in tool.data:
            if kind != "functionDeclarations":
                transcript.note("tool_dropped", kind[:64])
        for declaration in map(named, tool.objects("functionDeclarations")):
            parameters: dict[str, Any] | None = None
            if (schema := declaration.child("parametersJsonSchema")) is not None:
                parameters = writable(schema.data, schema.where)
            elif (schema := declaration.child("parameters")) is not None:
                parameters = json_schema(schema)
            name, description = declaration.need_string("name"), declaration.string("description")
            tools.append(function_tool(name, description, parameters))
    return tuple(tools)


def _tool_choice(
    fields: Fields, tools: tuple[dict[str, Any], ...], transcript: Transcript
) -> tuple[tuple[dict[str, Any], ...], Any]:
    """The tools that may be called, and chat's ``tool_choice``."""
    config = named(fields.child("toolConfig") or Fields({}, "toolConfig"))
    calling = named(config.child("functionCallingConfig") or Fields({}, "toolConfig"))
    mode = (calling.string("mode") or "AUTO").upper()
    if not tools:
        if mode == "ANY":
            transcript.note("tool_choice_dropped", "ANY without usable tools")
        return tools, None
    if mode == "NONE":
        return tools, "none"
    if mode in ("AUTO", "MODE_UNSPECIFIED"):
        return tools, "auto" if calling.raw("mode") is not None else None
    if mode not in ("ANY", "VALIDATED"):
        told = "must be AUTO, ANY, VALIDATED or NONE"
        raise invalid("toolConfig.functionCallingConfig.mode", told)
    allowed = calling.strings("allowedFunctionNames")
    if allowed:
        tools = tuple(tool for tool in tools if tool["function"]["name"] in allowed)
        if not tools:
            raise invalid(calling.path("allowedFunctionNames"), "names no declared function")
    if mode == "VALIDATED":
        return tools, "auto"
    if allowed and len(tools) == 1:
        return tools, {"type": "function", "function": {"name": tools[0]["function"]["name"]}}
    return tools, "required"


def _thinking(
    config: Fields, transcript: Transcript
) -> tuple[dict[str, Any], dict[str, Any] | None, bool]:
    """Fields to forward, template arguments, and whether thoughts are to be shown."""
    thinking = config.child("thinkingConfig")
    if thinking is None:
        return {}, None, False
    thinking = named(thinking)
    level = thinking.string("thinkingLevel")
    effort = level.lower() if level is not None and level != "THINKING_LEVEL_UNSPECIFIED" else None
    budget = thinking.integer("thinkingBudget")
    if budget == 0:
        effort = "none"
    elif budget is not None and budget > 0:
        transcript.note("field_dropped", "thinkingConfig.thinkingBudget")
    extra, template_kwargs = apply_effort(effort, None, transcript)
    return extra, template_kwargs, bool(thinking.boolean("includeThoughts"))


def _response_format(config: Fields, transcript: Transcript) -> dict[str, Any] | None:
    mime_type = config.string("responseMimeType") or "text/plain"
    given = config.child("responseJsonSchema")
    schema = writable(given.data, given.where) if given else None
    if schema is None and (declared := config.child("responseSchema")) is not None:
        schema = json_schema(declared)
    if mime_type == "application/json":
        if schema is None:
            return {"type": "json_object"}
        return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    if mime_type != "text/plain" or schema is not None:
        transcript.note("field_dropped", f"response format {mime_type[:32]}")
    return None


def _sampling(config: Fields) -> Sampling:
    candidates = config.integer("candidateCount")
    if candidates is not None and not 1 <= candidates <= 8:
        raise invalid(config.path("candidateCount"), "must be from 1 to 8")
    top_k = config.number("topK")
    return Sampling(
        temperature=config.number("temperature"),
        top_p=config.number("topP"),
        top_k=int(top_k) if top_k is not None and abs(top_k) < 2**31 else None,
        max_tokens=config.integer("maxOutputTokens"),
        stop=config.strings("stopSequences"),
        seed=config.integer("seed"),
        n=candidates,
        presence_penalty=config.number("presencePenalty"),
        frequency_penalty=config.number("frequencyPenalty"),
    )


def _wants(config: Fields) -> Wants:
    logprobs = bool(config.boolean("responseLogprobs"))
    top = config.integer("logprobs") or 0
    return Wants(logprobs=logprobs, top_logprobs=top if logprobs else 0, stream_usage=True)


def _note_unused(fields: Fields, read: frozenset[str], transcript: Transcript) -> None:
    for name, value in fields.data.items():
        if value is not None and name not in read:
            transcript.note("field_dropped", name[:64])
