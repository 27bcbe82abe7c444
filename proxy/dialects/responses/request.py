"""A Responses request as a canonical one."""

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
    integer,
    invalid,
    json_text,
    read_on,
    sampling,
    strings,
)
from bridle.proxy.dialects.functions import json_schema_format
from bridle.proxy.dialects.responses.conversations import named_conversation, note
from bridle.proxy.dialects.responses.history import Items
from bridle.proxy.dialects.responses.tools import ClientTool, ToolList
from bridle.proxy.dialects.thinking import apply_effort
from bridle.proxy.dialects.transcript import Transcript
from bridle.proxy.dialects.unsupported import Unsupported, refuse
from bridle.proxy.wire.canonical import Message, Request, Wants
from bridle.proxy.wire.histories import Known, Parsed, Reading
from bridle.store.records import Note

NOT_STORED: Final = Note("response_not_stored")
"""The note on a call whose client asked not to store the reply."""


class ResponsesFields(msgspec.Struct, frozen=True, gc=False):
    """The fields that only a Responses request has: its ``own``."""

    echo: bytes = b"{}"
    """The fields that a response repeats from its request, as one JSON object."""
    tools: Mapping[str, ClientTool] = {}
    """The client's tools by the name of the function that stands for each."""
    reasoning_summary: bool = False
    """True if reasoning is the item's ``summary``, and not its ``content``."""
    encrypted_reasoning: bool = False
    """True if reasoning items carry ``encrypted_content``."""
    conversation: str | None = None
    """The id of the conversation object that the response goes on with."""


_ECHOED: Final[Json] = {
    "background": False,
    "frequency_penalty": 0.0,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "presence_penalty": 0.0,
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
_INEFFECTIVE: Final = frozenset({"max_tool_calls", "truncation"})
"""Fields that are echoed but lack the effect that the client may expect. Each is noted."""
_INPUT: Final = "send the conversation as 'input'"
REFUSED: Final[Mapping[str, Unsupported]] = {
    "prompt": Unsupported(_INPUT),
    "background": Unsupported("leave it out and keep the connection open"),
    "context_management": Unsupported("shorten 'input' before it is sent"),
}
"""Fields that carry history, or change what the model is asked or when the reply comes."""


class _Reasoning(msgspec.Struct, gc=False):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class _Format(msgspec.Struct, gc=False):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: Json | None = None
    description: str | None = None
    strict: bool | None = None


class _Text(msgspec.Struct, gc=False):
    verbosity: str | None = None
    format: _Format | None = None


class _Body(msgspec.Struct, gc=False):
    model: str
    input: str | list[Json] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    include: str | list[str] | None = None
    stream: bool | None = None
    store: bool | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    reasoning: _Reasoning | None = None
    text: _Text | None = None
    chat_template_kwargs: Json | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integral | None = None
    min_p: float | None = None
    seed: Integral | None = None
    max_tokens: Integral | None = msgspec.field(default=None, name="max_output_tokens")
    top_logprobs: Integral | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None


_KNOWN: Final = (frozenset(_Body.__struct_encode_fields__) | _ECHOED.keys()) - _INEFFECTIVE
_WITHOUT_EFFECT: Final = frozenset({"stream_options", "client_metadata"})


def parse(body: bytes, path: Mapping[str, str], query: Mapping[str, str]) -> Request:
    """See :data:`bridle.proxy.wire.canonical.Parse`."""
    return parse_with(body, {})


def parse_on(
    body: bytes, path: Mapping[str, str], query: Mapping[str, str], known: Known
) -> Parsed:
    """See :data:`bridle.proxy.wire.histories.ParseOn`."""
    return read_on(body, "input", known, partial(_request, {}))


def parse_with(body: bytes, items: Mapping[str, Mapping[str, Any]]) -> Request:
    """Parse like :func:`parse`, with ``items`` in place of the references to them, by id."""
    return _request(items, decode(body), Reading())


def _request(items: Mapping[str, Mapping[str, Any]], fields: Json, reading: Reading) -> Request:
    """Return the request of a body with these ``fields``.

    ``items`` take the place of the references to them, by id. Raise :class:`ApiError` (400).
    """
    refuse(fields, REFUSED)
    wire = convert(fields, _Body)
    transcript = Transcript()
    tools = ToolList(transcript)
    tools.add(wire.tools or (), "tools")
    if wire.instructions is not None:
        transcript.system(wire.instructions)
    references = _add_input(wire, transcript, Items(tools, items), reading)
    conversation = named_conversation(wire.conversation)
    if conversation is not None:
        if wire.previous_response_id is not None:
            raise invalid("conversation", "mutually exclusive with 'previous_response_id'")
        noted = note("respond", conversation)
        transcript.note(noted.name, noted.detail)
    tool_choice = tools.choose(wire.tool_choice)
    reasoning = wire.reasoning or _Reasoning()
    extra, template_kwargs = apply_effort(reasoning.effort, wire.chat_template_kwargs, transcript)
    _note_unused(fields, transcript)
    if wire.store is False:
        transcript.note(NOT_STORED.name)
    include = strings(wire.include)
    return Request(
        dialect="responses",
        model=wire.model,
        messages=transcript.messages,
        tools=tuple(tools.chat),
        tool_choice=tool_choice,
        parallel_tool_calls=wire.parallel_tool_calls if tools.chat else None,
        response_format=_response_format(wire.text, transcript),
        sampling=sampling(wire),
        stream=bool(wire.stream),
        wants=_wants(wire, include),
        template_kwargs=template_kwargs,
        extra=extra,
        previous_response_id=wire.previous_response_id,
        references=references,
        instructions=wire.instructions is not None,
        own=ResponsesFields(
            conversation=conversation,
            echo=_echo(fields),
            tools=tools.client,
            reasoning_summary=bool(reasoning.summary or reasoning.generate_summary),
            encrypted_reasoning="reasoning.encrypted_content" in include,
        ),
        names={"max_tokens": "max_output_tokens", "messages": "input"},
        notes=transcript.notes,
    )


def own_messages(request: Request) -> tuple[Message, ...]:
    """Return the request's messages without its ``instructions``.

    A later request that continues this one does not inherit them.
    """
    return request.messages[1:] if request.instructions else request.messages


def with_history(request: Request, history: Sequence[Message]) -> Request:
    """Return ``request`` with the conversation of its ``previous_response_id``.

    The conversation stands before the input and after the ``instructions``. ``history`` is the
    previous request's :func:`own_messages`, the messages before them, and the previous reply.
    """
    head = request.messages[:1] if request.instructions else ()
    return msgspec.structs.replace(request, messages=(*head, *history, *own_messages(request)))


def with_items(body: bytes, items: Sequence[Json]) -> bytes:
    """Return a request with the ``items`` of its conversation before its input."""
    fields = decode(body)
    given = fields.get("input") or []
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return json_text(fields | {"input": [*items, *given]}, "input").encode()


def _add_input(
    wire: _Body, transcript: Transcript, items: Items, reading: Reading
) -> tuple[str, ...]:
    """Add the input. Return the ids that it refers to and that are not known."""
    if isinstance(wire.input, list):
        more = wire.instructions or wire.previous_response_id or wire.conversation
        if not (wire.input or more):
            raise invalid("input", "must be a non-empty list, or a string")
        transcript.extend(reading.over(wire.input, Transcript(), items.add))
        reading.lasting = items.self_contained
        return tuple(items.unknown)
    if wire.input is not None:
        transcript.user(wire.input)
    elif wire.previous_response_id is None and wire.conversation is None:
        raise invalid("input", "Field required")
    return ()


def _wants(wire: _Body, include: Sequence[str]) -> Wants:
    logprobs = "message.output_text.logprobs" in include
    top = integer(wire.top_logprobs, "top_logprobs") or 0
    return Wants(logprobs=logprobs, top_logprobs=top if logprobs else 0, stream_usage=True)


def _response_format(text: _Text | None, transcript: Transcript) -> Json | None:
    if text is None:
        return None
    if text.verbosity is not None:
        transcript.note("field_dropped", "text.verbosity")
    form = text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "json_object"}
    if form.name is None:
        raise invalid("text.format.name", "Field required")
    if form.schema is None:
        raise invalid("text.format.schema", "Field required")
    return json_schema_format(
        form.schema,
        "text.format.schema",
        form.name,
        description=form.description,
        strict=form.strict,
    )


def _echo(fields: Json) -> bytes:
    echo = {"instructions": fields.get("instructions")}
    for name, default in _ECHOED.items():
        value = fields.get(name)
        echo[name] = default if value is None else value
    if (conversation := named_conversation(fields.get("conversation"))) is not None:
        echo["conversation"] = {"id": conversation}
    echo["tools"] = [_echoed_tool(tool) for tool in fields.get("tools") or ()]
    return json_text(echo, "the request").encode()


def _echoed_tool(tool: Json) -> Json:
    """Return the tool with the fields that a function of a response always has."""
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": None, **tool}


def _note_unused(fields: Json, transcript: Transcript) -> None:
    for name, value in fields.items():
        if name in _KNOWN or name in _WITHOUT_EFFECT or value is None or value is False:
            continue
        if name not in _INEFFECTIVE or value != _ECHOED[name]:
            transcript.note("field_dropped", name)
