"""OpenAI chat completions: the shape that engines speak, so the translation is thin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, Final

import msgspec

from bridle.proxy.dialects.chat import openai
from bridle.proxy.dialects.chat.history import ParsedHistory, parsed, spans
from bridle.proxy.dialects.chat.openai import Count, Int64, StreamOptions
from bridle.proxy.dialects.errors import openai_error, openai_error_object
from bridle.proxy.dialects.fields import Fields, writable
from bridle.proxy.wire.canonical import (
    ApiError,
    ChoiceReply,
    DialectName,
    Event,
    Finished,
    HttpError,
    Message,
    Minted,
    ReasoningDelta,
    Reply,
    Request,
    Sampling,
    Started,
    TextDelta,
    Tokens,
    ToolCall,
    ToolCallDelta,
    Usage,
    Wants,
    plain_ids,
)
from bridle.store.records import Note

encode = msgspec.json.encode

_TEXT_TAIL: Final = b'},"logprobs":null,"finish_reason":null}]}\n\n'


class _Function(msgspec.Struct, gc=False):
    name: str
    arguments: str | dict[str, Any] | None = ""


class _ToolCall(msgspec.Struct, gc=False):
    id: str
    function: _Function


_ABSENT: Final = msgspec.Raw(b"null")


class _Message(msgspec.Struct, gc=False):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    audio: msgspec.Raw = _ABSENT
    function_call: msgspec.Raw = _ABSENT
    reasoning_details: msgspec.Raw = _ABSENT
    refusal: msgspec.Raw = _ABSENT
    thinking_blocks: msgspec.Raw = _ABSENT


class _Body(msgspec.Struct, gc=False):
    model: str
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    max_tokens: Int64 | None = None
    max_completion_tokens: Int64 | None = None
    stop: str | list[str] | None = None
    seed: Int64 | None = None
    n: Count | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=64)] | None = None
    return_token_ids: bool | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_DECODER = msgspec.json.Decoder(_Body)
_KNOWN: Final = frozenset(_Body.__struct_fields__)
_NOT_SENT_ON: Final = ("audio", "function_call", "reasoning_details", "refusal", "thinking_blocks")
"""What providers put beside a message's text and clients echo; no engine takes it."""
_SAYS_NOTHING: Final = frozenset({b"null", b"[]", b'""'})
_NESTED: Final = ("tools", "tool_choice", "response_format", "chat_template_kwargs")
"""Fields that hold any JSON, whose depth and numbers may be beyond what can be sent on."""
_LATER_NAMES: Final[Mapping[str, str]] = {"max_tokens": "max_completion_tokens"}
_ROLES: Final[Mapping[str, str]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


class ChatContext(msgspec.Struct, frozen=True, gc=False):
    hide_reasoning: bool = False


class ChatDialect:
    """See :class:`bridle.proxy.wire.canonical.Dialect`."""

    name: DialectName = "chat"
    stream_content_type = "text/event-stream; charset=utf-8"
    stream_failures: frozenset[str] = frozenset()

    def parse(self, body: bytes, path: Mapping[str, str], query: Mapping[str, str]) -> Request:
        wire = openai.decode(_DECODER, body)
        return _request(wire, body, *_messages(wire.messages))

    def parse_on(
        self, body: bytes, known: ParsedHistory | None
    ) -> tuple[Request, ParsedHistory | None]:
        """As :meth:`parse`, in time that grows with what ``known`` does not have; and what a later
        request may go on from. The request names that as its ``history``."""
        found = None if known is None else _continued(body, known)
        if found is None:
            wire = openai.decode(_DECODER, body)
            messages, notes = _messages(wire.messages)
            history = parsed(body, messages, notes)
            return _request(wire, body, messages, notes, history), history
        wire, short, history = found
        return _request(wire, short, history.messages, history.notes, history), history

    def mint(self, call_id: str, created: int, model: str) -> Minted:
        return Minted(call_id, created, f"chatcmpl-{call_id.removeprefix('call_')}", model)

    def emitter(self, request: Request, minted: Minted) -> ChatEmitter:
        return ChatEmitter(request, minted)

    def reply(self, request: Request, minted: Minted, reply: Reply) -> bytes:
        whole: dict[str, Any] = {
            "id": minted.response_id,
            "object": "chat.completion",
            "created": minted.created,
            "model": minted.model,
            "choices": [
                _choice(index, choice, request) for index, choice in enumerate(reply.choices)
            ],
        }
        if reply.usage is not None:
            whole["usage"] = openai.usage_object(reply.usage)
        if request.wants.token_ids:
            whole["prompt_token_ids"] = plain_ids(reply.prompt_token_ids)
        return encode(whole)

    def error(self, error: ApiError) -> HttpError:
        return openai_error(error)


class ChatEmitter:
    """Chat completion chunks. The finish, usage and ``[DONE]`` chunks are terminal."""

    def __init__(self, request: Request, minted: Minted) -> None:
        self._wants = request.wants
        self._choices = request.sampling.n or 1
        self._hide_reasoning = _hides_reasoning(request)
        self._head = (
            b'data: {"id":%b,"object":"chat.completion.chunk","created":%d,"model":%b,"choices":['
            % (encode(minted.response_id), minted.created, encode(minted.model))
        )
        self._text_head = self._head + b'{"index":0,"delta":{"content":'
        self._shows_tokens = self._wants.logprobs or self._wants.token_ids
        self._finished: dict[int, str] = {}
        self._usage: Usage | None = None
        self._tokens: dict[int, list[Tokens]] = {}

    def begin(self) -> bytes:
        role = b'{"role":"assistant","content":""}'
        return b"".join(self._chunk(index, role) for index in range(self._choices))

    def event(self, event: Event) -> bytes:
        # Most events are tokens and their text: no template is filled in for them but the text.
        if isinstance(event, Tokens):
            if self._shows_tokens:
                self._tokens.setdefault(event.choice, []).append(event)
            return b""
        if isinstance(event, TextDelta):
            text = encode(event.text)
            if event.choice or self._tokens:
                return self._chunk(event.choice, b'{"content":%b}' % text)
            return self._text_head + text + _TEXT_TAIL
        return self._rarer(event)

    def _rarer(self, event: Event) -> bytes:
        match event:
            case ReasoningDelta():
                if self._hide_reasoning:
                    return b""
                text = encode(event.text)
                delta = b'{"reasoning":%b,"reasoning_content":%b}' % (text, text)
                return self._chunk(event.choice, delta)
            case ToolCallDelta():
                delta = b'{"tool_calls":[%b]}' % encode(_tool_call_delta(event))
                return self._chunk(event.choice, delta)
            case Finished():
                self._finished[event.choice] = event.reason
            case Usage():
                self._usage = event
            case Started():
                if self._wants.token_ids and event.prompt_token_ids is not None:
                    return self._head + b'],"prompt_token_ids":%b}\n\n' % encode(
                        plain_ids(event.prompt_token_ids)
                    )
        return b""

    def keep_alive(self) -> bytes:
        return self._head + b'{"index":0,"delta":{},"logprobs":null,"finish_reason":null}]}\n\n'

    def end(self) -> bytes:
        chunks = [
            self._chunk(index, b"{}", finish=encode(reason))
            for index, reason in sorted(self._finished.items())
        ]
        if self._wants.stream_usage and self._usage is not None:
            usage = encode(openai.usage_object(self._usage))
            chunks.append(self._head + b'],"usage":%b}\n\n' % usage)
        chunks.append(b"data: [DONE]\n\n")
        return b"".join(chunks)

    def fail(self, error: ApiError) -> bytes:
        return b"data: %b\n\n" % encode({"error": openai_error_object(error)})

    def _chunk(self, choice: int, delta: bytes, finish: bytes = b"null") -> bytes:
        logprobs, token_ids = b"null", b""
        if self._tokens and (held := self._tokens.pop(choice, None)):
            if self._wants.logprobs:
                entries = [entry for tokens in held for entry in tokens.detail or ()]
                logprobs = encode({"content": entries, "refusal": None})
            if self._wants.token_ids:
                ids = [token for tokens in held for token in tokens.token_ids]
                token_ids = b',"token_ids":' + encode(ids)
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b}]}\n\n' % (
            self._head,
            choice,
            delta,
            logprobs,
            finish,
            token_ids,
        )


def _request(
    wire: _Body,
    body: bytes,
    messages: tuple[Message, ...],
    notes: tuple[tuple[Note, ...], ...],
    history: ParsedHistory | None = None,
) -> Request:
    """The request of ``wire`` with these messages; ``body`` is read for its other fields."""
    extra, dropped = openai.other_fields(body, _KNOWN, openai.FORWARDED)
    noted = list(dropped)
    if wire.top_logprobs and not wire.logprobs:
        raise openai.invalid("'logprobs' must be true to ask for 'top_logprobs'", "top_logprobs")
    tools = _tools(wire.tools or (), noted)
    for name in _NESTED:
        if (value := getattr(wire, name)) is not None:
            writable(value, name)
    tools, tool_choice = _tool_choice(wire.tool_choice, tools, noted)
    noted += dict.fromkeys(chain.from_iterable(notes))
    return Request(
        dialect="chat",
        model=wire.model,
        messages=messages,
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=wire.parallel_tool_calls,
        response_format=wire.response_format,
        sampling=_sampling(wire),
        stream=bool(wire.stream),
        wants=Wants(
            logprobs=bool(wire.logprobs),
            top_logprobs=wire.top_logprobs or 0,
            token_ids=bool(wire.return_token_ids),
            stream_usage=bool(wire.stream_options and wire.stream_options.include_usage),
        ),
        template_kwargs=wire.chat_template_kwargs,
        extra=extra,
        context=ChatContext(hide_reasoning=wire.include_reasoning is False),
        names={} if wire.max_completion_tokens is None else _LATER_NAMES,
        notes=tuple(noted),
        history=history,
    )


def _continued(body: bytes, known: ParsedHistory) -> tuple[_Body, bytes, ParsedHistory] | None:
    """The request without the messages that ``known`` has, its bytes, and the whole history;
    ``None`` when it must be read from the start."""
    count = min(known.shared(body), len(known.ends))
    cut = known.without(count, body) if count else None
    if cut is None and count > 1:
        # Nothing new follows: leave the last message to be read again.
        count -= 1
        cut = known.without(count, body)
    if cut is None:
        return None
    short, rest = cut
    try:
        wire = openai.decode(_DECODER, short)
        messages, notes = _messages(wire.messages)
    except ApiError:
        return None  # the whole body's error names the right place
    new = spans(short)
    if new is None or new[0][0] != known.start:
        return None  # a second list of messages counts, not the one that is known
    moved = rest - known.start
    ends = (*known.ends[:count], *(end + moved for _, end in new))
    history = ParsedHistory(
        start=known.start,
        ends=ends,
        body=body,
        messages=known.messages[:count] + messages,
        notes=known.notes[:count] + notes,
        units=[unit for unit in known.units if unit.end < count],
    )
    return wire, short, history


def _messages(
    wire: Sequence[_Message],
) -> tuple[tuple[Message, ...], tuple[tuple[Note, ...], ...]]:
    """The messages, and what was converted in each."""
    messages, notes = [], []
    for position, message in enumerate(wire):
        noted: list[Note] = []
        messages.append(_message(message, position, noted))
        notes.append(tuple(noted))
    return tuple(messages), tuple(notes)


def _message(wire: _Message, position: int, notes: list[Note]) -> Message:
    role = _ROLES.get(wire.role)
    if role is None:
        raise openai.invalid(
            f"{wire.role!r} is not a role; use one of {', '.join(_ROLES)}",
            f"messages[{position}].role",
        )
    if role != wire.role:
        notes.append(Note("role_converted", f"{wire.role} as {role}"))
    for index, part in enumerate(wire.content if isinstance(wire.content, list) else ()):
        if not _plain(part):
            _check_part(part, f"messages[{position}].content[{index}]")
    for name in _NOT_SENT_ON:
        raw = getattr(wire, name)
        if raw is not _ABSENT and bytes(raw) not in _SAYS_NOTHING:
            notes.append(Note("field_dropped", f"messages.{name}"))
    reasoning = wire.reasoning if wire.reasoning is not None else wire.reasoning_content
    return Message(
        role=role,  # type: ignore[arg-type]
        content=wire.content,
        reasoning=reasoning,
        tool_calls=tuple(_tool_call(call, notes) for call in wire.tool_calls or ()),
        tool_call_id=wire.tool_call_id,
        name=wire.name,
    )


def _plain(part: dict[str, Any]) -> bool:
    """Whether ``part`` is strings, one level deep at most, with a text if it is one. Nearly all
    are, and an image of megabytes is not written as JSON to find it out."""
    if part.get("type") == "text" and "text" not in part:
        return False
    for name, value in part.items():
        if type(value) is str:
            continue
        if name == "text" or type(value) is not dict:
            return False
        if not all([type(inner) is str for inner in value.values()]):
            return False
    return True


def _check_part(part: dict[str, Any], where: str) -> None:
    """Raises :class:`ApiError` (400) for a part whose text is none, or that JSON cannot carry."""
    if not isinstance(part.get("text"), str) and ("text" in part or part.get("type") == "text"):
        raise openai.invalid("the text of a part must be a string", f"{where}.text")
    writable(part, where)


def _tool_call(wire: _ToolCall, notes: list[Note]) -> ToolCall:
    arguments = wire.function.arguments
    if isinstance(arguments, dict):
        notes.append(Note("arguments_were_an_object", wire.function.name))
        arguments = encode(arguments).decode()
    return ToolCall(id=wire.id, name=wire.function.name, arguments=arguments or "")


def _tools(wire: list[dict[str, Any]] | tuple[()], notes: list[Note]) -> tuple[dict[str, Any], ...]:
    kept = []
    for position, tool in enumerate(wire):
        kind = tool.get("type", "function")
        if kind != "function":
            notes.append(Note("tool_dropped", str(kind)))
            continue
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise openai.invalid(
                "a function tool needs a function with a name", f"tools[{position}].function"
            )
        kept.append({"type": "function", "function": function})
    return tuple(kept)


def _tool_choice(
    wire: str | dict[str, Any] | None, tools: tuple[dict[str, Any], ...], notes: list[Note]
) -> tuple[tuple[dict[str, Any], ...], Any]:
    """The tools that may be called, and what engines know as ``tool_choice``."""
    if isinstance(wire, dict) and wire.get("type") == "allowed_tools":
        return _allowed(Fields(wire, "tool_choice"), tools, notes)
    if isinstance(wire, dict) and wire.get("type") != "function":
        notes.append(Note("tool_choice_dropped", str(wire.get("type"))))
        return tools, None
    return tools, wire


def _allowed(
    wire: Fields, tools: tuple[dict[str, Any], ...], notes: list[Note]
) -> tuple[tuple[dict[str, Any], ...], Any]:
    allowed = Fields.of(wire.raw("allowed_tools"), wire.path("allowed_tools"))
    functions = [tool.child("function") for tool in allowed.objects("tools")]
    names = {function.string("name") for function in functions if function is not None}
    tools = tuple(tool for tool in tools if tool["function"]["name"] in names)
    mode = allowed.need_string("mode")
    if mode not in ("auto", "required"):
        raise openai.invalid("allowed tools are 'auto' or 'required'", allowed.path("mode"))
    if not tools:
        if mode == "required":
            notes.append(Note("tool_choice_dropped", "required without usable tools"))
        return tools, None
    return tools, mode


def _sampling(wire: _Body) -> Sampling:
    most = wire.max_completion_tokens
    return Sampling(
        temperature=wire.temperature,
        top_p=wire.top_p,
        top_k=wire.top_k,
        min_p=wire.min_p,
        max_tokens=wire.max_tokens if most is None else most,
        stop=(wire.stop,) if isinstance(wire.stop, str) else tuple(wire.stop or ()),
        seed=wire.seed,
        n=wire.n,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        repetition_penalty=wire.repetition_penalty,
    )


def _choice(index: int, choice: ChoiceReply, request: Request) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if choice.tool_calls and not choice.text else choice.text,
        "refusal": None,
    }
    if choice.reasoning and not _hides_reasoning(request):
        message["reasoning"] = message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in choice.tool_calls
        ]
    shown: dict[str, Any] = {
        "index": index,
        "message": message,
        "logprobs": {"content": choice.detail, "refusal": None} if request.wants.logprobs else None,
        "finish_reason": choice.finish_reason,
    }
    if request.wants.token_ids:
        shown["token_ids"] = choice.token_ids
    return shown


def _tool_call_delta(event: ToolCallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": event.arguments}
    if event.id is None:
        return {"index": event.index, "function": function}
    function["name"] = event.name
    return {"index": event.index, "id": event.id, "type": "function", "function": function}


def _hides_reasoning(request: Request) -> bool:
    return isinstance(request.context, ChatContext) and request.context.hide_reasoning
