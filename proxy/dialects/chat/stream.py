"""A chat reply as it streams: canonical events become chat completion chunks."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from bridle.proxy.dialects.chat.reply import usage_object
from bridle.proxy.dialects.errors import openai_error_object
from bridle.proxy.wire.canonical import (
    ApiError,
    Event,
    Finished,
    Minted,
    Opaque,
    ReasoningDelta,
    Request,
    Started,
    TextDelta,
    Tokens,
    ToolCallDelta,
    Usage,
    plain_ids,
)

encode = msgspec.json.encode

_TEXT_TAIL: Final = b'},"logprobs":null,"finish_reason":null}]}\n\n'


class ChatEmitter:
    """Writes one streamed reply; see :class:`bridle.proxy.wire.canonical.Emitter`.

    The finish, usage and ``[DONE]`` chunks are terminal.
    """

    content_type = "text/event-stream; charset=utf-8"
    object_type = b"chat.completion.chunk"
    nothing = b"{}"
    """The payload of a chunk that has no text."""

    def __init__(self, request: Request, minted: Minted) -> None:
        self.wants = request.wants
        self._choices = request.sampling.n or 1
        self.head = b'data: {"id":%b,"object":"%b","created":%d,"model":%b,"choices":[' % (
            encode(minted.response_id),
            self.object_type,
            minted.created,
            encode(minted.model),
        )
        self._text_head = self.head + b'{"index":0,"delta":{"content":'
        self._shows_tokens = self.wants.logprobs or self.wants.token_ids
        self._finished: dict[int, str] = {}
        self._usage: Usage | None = None
        self.tokens: dict[int, list[Tokens]] = {}

    def begin(self) -> bytes:
        role = b'{"role":"assistant","content":""}'
        return b"".join(self.chunk(index, role) for index in range(self._choices))

    def event(self, event: Event) -> bytes:
        # Most events are tokens and their text, for which only the text is filled in.
        if isinstance(event, Tokens):
            if self._shows_tokens:
                self.tokens.setdefault(event.choice, []).append(event)
            return b""
        if isinstance(event, TextDelta):
            text = encode(event.text)
            if event.choice or self.tokens:
                return self.chunk(event.choice, b'{"content":%b}' % text)
            return self._text_head + text + _TEXT_TAIL
        return self.other_event(event)

    def other_event(self, event: Event) -> bytes:
        match event:
            case ReasoningDelta():
                if not self.wants.reasoning:
                    return b""
                text = encode(event.text)
                delta = b'{"reasoning":%b,"reasoning_content":%b}' % (text, text)
                return self.chunk(event.choice, delta)
            case ToolCallDelta():
                delta = b'{"tool_calls":[%b]}' % encode(_tool_call_delta(event))
                return self.chunk(event.choice, delta)
            case Opaque():
                return (
                    self.chunk(event.choice, encode(event.fields)) if self.wants.reasoning else b""
                )
            case Finished():
                self._finished[event.choice] = event.reason
            case Usage():
                self._usage = event
            case Started():
                if self.wants.token_ids and event.prompt_token_ids is not None:
                    return self.head + b'],"prompt_token_ids":%b}\n\n' % encode(
                        plain_ids(event.prompt_token_ids)
                    )
        return b""

    def keep_alive(self) -> bytes:
        return self.head + b'{"index":0,"delta":{},"logprobs":null,"finish_reason":null}]}\n\n'

    def end(self) -> bytes:
        chunks = [
            self.chunk(index, self.nothing, finish=encode(reason))
            for index, reason in sorted(self._finished.items())
        ]
        if self.wants.stream_usage and self._usage is not None:
            usage = encode(usage_object(self._usage))
            chunks.append(self.head + b'],"usage":%b}\n\n' % usage)
        chunks.append(b"data: [DONE]\n\n")
        return b"".join(chunks)

    def fail(self, error: ApiError) -> bytes:
        return b"data: %b\n\n" % encode({"error": openai_error_object(error)})

    def chunk(self, choice: int, delta: bytes, finish: bytes = b"null") -> bytes:
        logprobs, token_ids = b"null", b""
        if self.tokens and (held := self.tokens.pop(choice, None)):
            if self.wants.logprobs:
                entries = [entry for tokens in held for entry in tokens.detail or ()]
                logprobs = encode({"content": entries, "refusal": None})
            if self.wants.token_ids:
                ids = [token for tokens in held for token in tokens.token_ids]
                token_ids = b',"token_ids":' + encode(ids)
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b}]}\n\n' % (
            self.head,
            choice,
            delta,
            logprobs,
            finish,
            token_ids,
        )


def _tool_call_delta(event: ToolCallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": event.arguments}
    extra = event.extra or {}
    if event.id is None:
        return {"index": event.index, "function": function, **extra}
    function["name"] = event.name
    return {"index": event.index, "id": event.id, "type": "function", "function": function, **extra}
