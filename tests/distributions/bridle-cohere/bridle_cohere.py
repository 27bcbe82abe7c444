"""Cohere's chat API (v2) as a dialect: text, thinking, function tools, streamed or whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
import orjson

from bridle.proxy.dialects.body import (
    Integral,
    Json,
    convert,
    decode,
    invalid,
    sampling,
    unknown,
    writable,
)
from bridle.proxy.dialects.dialect import (
    Action,
    ApiPath,
    Dialect,
    Model,
    ModelList,
    Provider,
    sent_with,
)
from bridle.proxy.dialects.errors import http_error
from bridle.proxy.dialects.functions import call_in_pieces, function_tool
from bridle.proxy.dialects.overflow import numbers_of
from bridle.proxy.dialects.sse import event_bytes
from bridle.proxy.dialects.thinking import apply_effort
from bridle.proxy.dialects.transcript import Transcript, joined, text_part
from bridle.proxy.dialects.unsupported import Unsupported, refuse
from bridle.proxy.wire.canonical import (
    ApiError,
    ChoiceReply,
    Event,
    Finished,
    FinishReason,
    HttpError,
    Minted,
    ReasoningDelta,
    Reply,
    Request,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
)


class _Function(msgspec.Struct, gc=False):
    name: str = ""
    arguments: str = "{}"
    description: str | None = None
    parameters: Json | None = None


class _Called(msgspec.Struct, gc=False):
    id: str
    function: _Function


class _Message(msgspec.Struct, gc=False):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Json] | None = None
    tool_calls: list[_Called] | None = None
    tool_plan: str | None = None
    tool_call_id: str = ""


class _Tool(msgspec.Struct, gc=False):
    function: _Function


class _Thinking(msgspec.Struct, gc=False):
    type: Literal["enabled", "disabled"]


class _Format(msgspec.Struct, gc=False):
    type: Literal["text", "json_object"]
    json_schema: Json | None = None


class _Body(msgspec.Struct, gc=False):
    model: str
    messages: list[_Message]
    stream: bool | None = None
    tools: list[_Tool] | None = None
    tool_choice: Literal["REQUIRED", "NONE"] | None = None
    response_format: _Format | None = None
    thinking: _Thinking | None = None
    max_tokens: Integral | None = None
    temperature: float | None = None
    seed: Integral | None = None
    stop: list[str] | None = msgspec.field(default=None, name="stop_sequences")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: Integral | None = msgspec.field(default=None, name="k")
    top_p: float | None = msgspec.field(default=None, name="p")


_KNOWN: Final = frozenset(_Body.__struct_encode_fields__)
_REFUSED: Final = {"documents": Unsupported("send their text in a message")}
_CHOICES: Final = {"REQUIRED": "required", "NONE": "none"}
_FINISH: Final[Mapping[FinishReason | None, str]] = {
    "length": "MAX_TOKENS",
    "tool_calls": "TOOL_CALL",
    "content_filter": "ERROR",
}


def parse(body: bytes, path: Mapping[str, str], query: Mapping[str, str]) -> Request:
    """Return the chat request in ``body``. Raise ``ApiError`` (400) that names the field."""
    fields = decode(body)
    refuse(fields, _REFUSED)
    wire = convert(fields, _Body)
    if not wire.messages:
        raise invalid("messages", "must not be empty")
    transcript = Transcript()
    for position, message in enumerate(wire.messages):
        _add(message, f"messages[{position}]", transcript)
    tools = tuple(
        function_tool(
            tool.function.name,
            tool.function.description,
            tool.function.parameters,
            f"tools[{position}].function.parameters",
        )
        for position, tool in enumerate(wire.tools or ())
    )
    disabled = wire.thinking is not None and wire.thinking.type == "disabled"
    extra, template_kwargs = apply_effort("none" if disabled else None, None, transcript)
    for name in unknown(fields, _KNOWN):
        transcript.note("field_dropped", name[:64])
    return Request(
        dialect="cohere_chat",
        model=wire.model,
        messages=transcript.messages,
        tools=tools,
        tool_choice=_CHOICES.get(wire.tool_choice or "") if tools else None,
        response_format=_response_format(wire.response_format),
        sampling=sampling(wire),
        stream=bool(wire.stream),
        extra=extra,
        template_kwargs=template_kwargs,
        names={"top_p": "p", "top_k": "k"},
        notes=transcript.notes,
    )


def _add(message: _Message, field: str, transcript: Transcript) -> None:
    parts = _parts(message.content, f"{field}.content", transcript)
    if message.role == "assistant":
        calls = message.tool_calls or []
        turn = transcript.turn(*[call.id for call in calls], new_text=True)
        if message.tool_plan:
            turn.text.append(message.tool_plan)
        for part in parts:
            (turn.text if part["type"] == "text" else turn.reasoning).append(part["text"])
        for call in calls:
            turn.tool_calls.append(ToolCall(call.id, call.function.name, call.function.arguments))
    elif message.role == "tool":
        transcript.tool(message.tool_call_id, joined(parts))
    elif message.role == "user":
        transcript.user(joined(parts))
    else:
        transcript.system(joined(parts))


def _parts(given: str | list[Json] | None, field: str, transcript: Transcript) -> list[Json]:
    """Return the content as parts with a ``type`` and a ``text``.

    An image stays as it is, since Cohere's part is that of chat completions.
    """
    if given is None or isinstance(given, str):
        return [text_part(given)] if given else []
    parts: list[Json] = []
    for index, part in enumerate(given):
        match part:
            case {"type": "text", "text": str(text)}:
                parts.append(text_part(text))
            case {"type": "thinking", "thinking": str(text)}:
                parts.append({"type": "thinking", "text": text})
            case {"type": "document", "document": {"data": data}}:
                text = data if isinstance(data, str) else orjson.dumps(data).decode()
                parts.append(text_part(text))
            case {"type": "image_url", "image_url": dict()}:
                parts.append(writable(part, f"{field}[{index}]"))
            case _:
                raise invalid(f"{field}[{index}]", "is no text, document or image")
    return parts


def _response_format(given: _Format | None) -> Json | None:
    if given is None or given.type == "text":
        return None
    if given.json_schema is None:
        return {"type": "json_object"}
    schema = writable(given.json_schema, "response_format.json_schema")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}


def _usage(usage: Usage | None) -> Json:
    found = usage or Usage(0, 0)
    tokens = {"input_tokens": found.prompt_tokens, "output_tokens": found.completion_tokens}
    return {"billed_units": tokens, "tokens": tokens, "cached_tokens": found.cached_tokens}


def _finish(reason: FinishReason | None, stop_sequence: str | None) -> str:
    return _FINISH.get(reason, "COMPLETE" if stop_sequence is None else "STOP_SEQUENCE")


def write(request: Request, minted: Minted, reply: Reply) -> bytes:
    """Return the whole reply, as JSON."""
    choice = reply.choices[0] if reply.choices else ChoiceReply()
    message: Json = {"role": "assistant"}
    content: list[Json] = []
    if choice.reasoning:
        content.append({"type": "thinking", "thinking": choice.reasoning})
    if choice.text:
        content.append({"type": "text", "text": choice.text})
    if content:
        message["content"] = content
    if choice.tool_calls:
        message["tool_calls"] = [
            _called(call.id, call.name, call.arguments) for call in choice.tool_calls
        ]
    return orjson.dumps(
        {
            "id": minted.response_id,
            "finish_reason": _finish(choice.finish_reason, choice.stop_sequence),
            "message": message,
            "usage": _usage(reply.usage),
        }
    )


def _called(identifier: str, name: str, arguments: str) -> Json:
    function = {"name": name, "arguments": arguments}
    return {"id": identifier, "type": "function", "function": function}


class CohereEmitter:
    """Writes one streamed reply; see :class:`bridle.proxy.wire.canonical.Emitter`."""

    content_type = "text/event-stream"

    def __init__(self, request: Request, minted: Minted) -> None:
        self._minted = minted
        self._index = -1
        self._open: Literal["text", "thinking"] | int | None = None
        """The kind of the content that is being written; a tool call's index for a call."""
        self._finished = Finished("stop")
        self._usage: Usage | None = None

    def begin(self) -> bytes:
        message = {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": []}
        start = {"type": "message-start", "id": self._minted.response_id}
        return event_bytes({**start, "delta": {"message": message}})

    def event(self, event: Event) -> bytes:
        match event:
            case TextDelta() if event.text:
                return self._content("text", event.text)
            case ReasoningDelta() if event.text:
                return self._content("thinking", event.text)
            case ToolCallDelta():
                return self._call(event)
            case Finished():
                self._finished = event
            case Usage():
                self._usage = event
            case _:
                pass
        return b""

    def keep_alive(self) -> bytes:
        return b": keep-alive\n\n"

    def end(self) -> bytes:
        reason = _finish(self._finished.reason, self._finished.stop_sequence)
        return self._closed() + self._last({"finish_reason": reason, "usage": _usage(self._usage)})

    def fail(self, error: ApiError) -> bytes:
        return self._last({"finish_reason": "ERROR", "error": _message(error)})

    def _last(self, delta: Json) -> bytes:
        end = {"type": "message-end", "id": self._minted.response_id, "delta": delta}
        return event_bytes(end) + b"data: [DONE]\n\n"

    def _content(self, kind: Literal["text", "thinking"], text: str) -> bytes:
        opening = b""
        if self._open != kind:
            opening = self._closed()
            self._open, self._index = kind, self._index + 1
            opening += self._event("content-start", content={"type": kind, kind: ""})
        return opening + self._event("content-delta", content={kind: text})

    def _call(self, event: ToolCallDelta) -> bytes:
        if self._open == event.index:
            return self._event(
                "tool-call-delta", tool_calls={"function": {"arguments": event.arguments}}
            )
        if event.id is None or event.name is None:
            raise call_in_pieces(event.index)
        closed = self._closed()
        self._open, self._index = event.index, event.index
        called = _called(event.id, event.name, event.arguments)
        return closed + self._event("tool-call-start", tool_calls=called)

    def _closed(self) -> bytes:
        if self._open is None:
            return b""
        kind = "content-end" if isinstance(self._open, str) else "tool-call-end"
        self._open = None
        return event_bytes({"type": kind, "index": self._index})

    def _event(self, kind: str, **message: Any) -> bytes:
        delta = {"message": message}
        return event_bytes({"type": kind, "index": self._index, "delta": delta})


def _message(error: ApiError) -> str:
    if error.kind != "context_overflow":
        return error.message
    numbers = numbers_of(error)
    if numbers.prompt is None or numbers.limit is None:
        return f"too many tokens: {error.message}"
    return (
        f"too many tokens: size limit exceeded by {numbers.prompt - numbers.limit} tokens. "
        "Try using shorter or fewer inputs."
    )


def error_reply(error: ApiError) -> HttpError:
    """Return the error in Cohere's shape."""
    return http_error(error, {"id": "", "message": _message(error)})


def _model(model: Model) -> Json:
    return {"name": model.id, "endpoints": ["chat"], "context_length": model.context_length}


def _models(models: Sequence[Model]) -> bytes:
    return orjson.dumps({"models": [_model(model) for model in models]})


_CLIENTS: Final = sent_with("x-fern-sdk-name")

COHERE: Final = Dialect(
    name="cohere_chat",
    provider=Provider("cohere", url_variables=("CO_API_URL",), key_variables=("CO_API_KEY",)),
    paths=(
        ApiPath("/v2/chat"),
        ApiPath("/v1/models", Action.MODELS, "GET", _CLIENTS),
        ApiPath("/v1/models/(?P<model>.+)", Action.MODELS, "GET", _CLIENTS),
    ),
    parse=parse,
    emitter=CohereEmitter,
    reply=write,
    error=error_reply,
    models=ModelList(lambda model: orjson.dumps(_model(model)), _models),
    response_prefix="chat",
)
