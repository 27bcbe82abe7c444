"""A Responses request as a canonical one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from bridle.proxy.dialects.fields import Fields, decode_object, invalid, json_text, writable
from bridle.proxy.dialects.responses.items import add_items
from bridle.proxy.dialects.responses.tools import Tools
from bridle.proxy.dialects.thinking import apply_effort
from bridle.proxy.dialects.turns import Transcript
from bridle.proxy.wire.canonical import Message, Request, Sampling, Wants

_ECHOED: Final[dict[str, Any]] = {
    "background": False,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
"""Request fields that a response repeats, with the provider's defaults."""
_READ: Final = frozenset(
    {"model", "input", "instructions", "include", "stream", "stream_options", "client_metadata"}
    | {"chat_template_kwargs", "top_k", "min_p", "seed", "repetition_penalty"}
    | {"presence_penalty", "frequency_penalty"}
)
_INEFFECTIVE: Final = frozenset({"background", "max_tool_calls", "truncation"})
"""Echoed, but without the effect that the client may expect: each is noted."""
_REFUSED: Final = frozenset({"conversation", "prompt"})
"""Fields that stand for content which only the provider has; dropping them would change it."""


@dataclass(frozen=True, slots=True)
class ResponsesContext:
    """What the reply needs to know of the request."""

    echo: bytes
    """The fields that a response repeats from its request, as one JSON object."""
    tools: Tools
    instructions: bool
    """Whether ``messages[0]`` is the request's ``instructions``, which are not inherited by
    a response that continues this one."""
    summarise: bool
    """Reasoning goes to ``summary`` (the client asked for one), else to ``content``."""
    encrypted: bool
    """The client asked for ``reasoning.encrypted_content``."""
    store: bool
    client_metadata: dict[str, Any]
    """Codex's identity of thread, turn and session."""
    references: tuple[str, ...] = ()
    """Ids of items that the input names and that were not given to :func:`parse`."""


def parse(body: bytes, items: Mapping[str, Mapping[str, Any]] | None = None) -> Request:
    """``items`` stand for the references to them, by id.

    Raises :class:`bridle.proxy.wire.canonical.ApiError` (400) naming the field.
    """
    fields = decode_object(body)
    for name in sorted(_REFUSED):
        if fields.raw(name) is not None:
            raise invalid(name, "is not supported; send the conversation as 'input'")
    transcript = Transcript()
    tools = Tools()
    for tool in fields.objects("tools"):
        tools.add(tool, transcript)
    instructions = fields.string("instructions")
    if instructions is not None:
        transcript.system(instructions)
    references = _add_input(fields, transcript, tools, items or {})
    tool_choice = tools.choose(fields, transcript)
    reasoning = fields.child("reasoning")
    effort = reasoning.string("effort") if reasoning else None
    extra, template_kwargs = apply_effort(effort, _template_kwargs(fields), transcript)
    _note_unused(fields, transcript)
    return Request(
        dialect="responses",
        model=fields.need_string("model"),
        messages=transcript.messages,
        tools=tuple(tools.chat),
        tool_choice=tool_choice,
        parallel_tool_calls=fields.boolean("parallel_tool_calls") if tools.chat else None,
        response_format=_response_format(fields, transcript),
        sampling=_sampling(fields),
        stream=bool(fields.boolean("stream")),
        wants=_wants(fields),
        template_kwargs=template_kwargs,
        extra=extra,
        previous_response_id=fields.string("previous_response_id"),
        context=ResponsesContext(
            echo=_echo(fields),
            tools=tools,
            instructions=instructions is not None,
            summarise=_asks_for_summary(reasoning),
            encrypted="reasoning.encrypted_content" in fields.strings("include"),
            store=fields.boolean("store") is not False,
            client_metadata=metadata.data if (metadata := fields.child("client_metadata")) else {},
            references=references,
        ),
        names={"max_tokens": "max_output_tokens", "messages": "input"},
        notes=transcript.notes,
    )


def own_messages(request: Request) -> tuple[Message, ...]:
    """The request's messages as a later ``previous_response_id`` inherits them: all but the
    ``instructions``."""
    context: ResponsesContext = request.context
    return request.messages[1:] if context.instructions else request.messages


def with_history(request: Request, history: Sequence[Message]) -> Request:
    """``request`` with the conversation of its ``previous_response_id`` put before its input,
    after its ``instructions``. ``history`` is the previous request's :func:`own_messages`, what
    came before them, and the previous reply."""
    context: ResponsesContext = request.context
    head = request.messages[:1] if context.instructions else ()
    return msgspec.structs.replace(request, messages=(*head, *history, *own_messages(request)))


def _add_input(
    fields: Fields, transcript: Transcript, tools: Tools, known: Mapping[str, Mapping[str, Any]]
) -> tuple[str, ...]:
    """Files the input; the ids that it refers to and that are not ``known``."""
    given = fields.raw("input")
    if isinstance(given, list):
        if not given and not any(map(fields.raw, ("instructions", "previous_response_id"))):
            raise invalid("input", "must be a non-empty list, or a string")
        return add_items(fields.objects("input"), transcript, tools, known)
    if isinstance(given, str):
        transcript.user(given)
    elif given is not None:
        raise invalid("input", "must be a string or a list of items")
    elif fields.raw("previous_response_id") is None:
        raise invalid("input", "is required")
    return ()


def _sampling(fields: Fields) -> Sampling:
    return Sampling(
        temperature=fields.number("temperature"),
        top_p=fields.number("top_p"),
        top_k=fields.integer("top_k"),
        min_p=fields.number("min_p"),
        max_tokens=fields.integer("max_output_tokens"),
        seed=fields.integer("seed"),
        presence_penalty=fields.number("presence_penalty"),
        frequency_penalty=fields.number("frequency_penalty"),
        repetition_penalty=fields.number("repetition_penalty"),
    )


def _wants(fields: Fields) -> Wants:
    logprobs = "message.output_text.logprobs" in fields.strings("include")
    top = fields.integer("top_logprobs") or 0
    return Wants(logprobs=logprobs, top_logprobs=top if logprobs else 0, stream_usage=True)


def _template_kwargs(fields: Fields) -> dict[str, Any] | None:
    kwargs = fields.child("chat_template_kwargs")
    return writable(kwargs.data, kwargs.where) if kwargs else None


def _response_format(fields: Fields, transcript: Transcript) -> dict[str, Any] | None:
    text = fields.child("text")
    if text is None:
        return None
    if text.string("verbosity") is not None:
        transcript.note("field_dropped", "text.verbosity")
    form = text.child("format")
    kind = form.need_string("type") if form else "text"
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema":
        raise invalid("text.format.type", "must be 'text', 'json_object' or 'json_schema'")
    schema = form.child("schema")
    if schema is None:
        raise invalid("text.format.schema", "is required")
    wanted: dict[str, Any] = {
        "name": form.need_string("name"),
        "schema": writable(schema.data, schema.where),
    }
    if (description := form.string("description")) is not None:
        wanted["description"] = description
    if (strict := form.boolean("strict")) is not None:
        wanted["strict"] = strict
    return {"type": "json_schema", "json_schema": wanted}


def _asks_for_summary(reasoning: Fields | None) -> bool:
    if reasoning is None:
        return False
    return bool(reasoning.string("summary") or reasoning.string("generate_summary"))


def _echo(fields: Fields) -> bytes:
    echo = {"instructions": fields.raw("instructions")}
    for name, default in _ECHOED.items():
        value = fields.raw(name)
        echo[name] = default if value is None else value
    return json_text(echo, "the request").encode()


def _note_unused(fields: Fields, transcript: Transcript) -> None:
    for name, value in fields.data.items():
        if value is None or value is False or name in _READ:
            continue
        if name not in _ECHOED or (name in _INEFFECTIVE and value != _ECHOED[name]):
            transcript.note("field_dropped", name)
