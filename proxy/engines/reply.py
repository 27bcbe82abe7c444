"""An engine's reply, whole or in chunks, as canonical events.

The wire shapes are vLLM's (``engine/contract/contract.py``). Tool calls get their minted ids here,
once, so that emitters, fold and record all see the same; the engine's own are kept beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec

from bridle.proxy.wire.canonical import (
    ApiError,
    Event,
    Finished,
    FinishReason,
    Minted,
    ReasoningDelta,
    Started,
    TextDelta,
    Tokens,
    ToolCallDelta,
    Usage,
)
from bridle.proxy.wire.cut_ids import PLACEHOLDER, WORTH_CUTTING, cut_prompt_ids, read_ids
from bridle.store.records import TokenIds

_FINISH_REASONS: Final[Mapping[str, FinishReason]] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
    "repetition": "stop",
}

Entry = TypeVar("Entry")
Index = Annotated[int, msgspec.Meta(ge=0, lt=1024)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct, gc=False):
    index: Index | None = None
    id: str | None = None
    function: _Function | None = None


class _Text(msgspec.Struct, gc=False):
    """A streamed ``delta`` or a whole ``message``."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Logprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct, Generic[Entry], gc=False):
    """Chat puts entries under ``content``, completions plain numbers under ``token_logprobs``."""

    content: list[Entry] | None = None
    token_logprobs: list[float | None] | None = None
    tokens: list[str] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct, Generic[Entry], gc=False):
    index: Index = 0
    delta: _Text | None = None
    message: _Text | None = None
    text: str | None = None
    logprobs: _Logprobs[Entry] | None = None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | str | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class _CachedTokens(msgspec.Struct, gc=False):
    cached_tokens: Count | None = None


class _ReasoningTokens(msgspec.Struct, gc=False):
    reasoning_tokens: Count | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: Count = 0
    completion_tokens: Count | None = None
    prompt_tokens_details: _CachedTokens | None = None
    completion_tokens_details: _ReasoningTokens | None = None


class _Body(msgspec.Struct, Generic[Entry], gc=False):
    choices: list[_Choice[Entry]] = []
    usage: _Usage | None = None
    prompt_token_ids: list[TokenId] | str | None = None
    """A text only where the ids were cut out before (``proxy/wire/cut_ids.py``)."""
    error: Any = None
    model: str | None = None


_LEAN = msgspec.json.Decoder(_Body[_Logprob])
_DETAILED = msgspec.json.Decoder(_Body[dict[str, Any]])


class ReplyDecoder:
    """Turns the payloads of one reply into events and knows when the reply is whole."""

    def __init__(
        self,
        minted: Minted,
        *,
        choices: int,
        detail: bool,
        tool_call_prefix: str = "call",
        read_prompt: Callable[[bytes], TokenIds | None] = read_ids,
    ) -> None:
        """``read_prompt`` turns the text of a long array of prompt ids into ids."""
        self._minted = minted
        self._choices = choices
        self._detail = detail
        self._decode = _DETAILED.decode if detail else _LEAN.decode
        self._prefix = tool_call_prefix
        self._read_prompt = read_prompt
        self._started = False
        self._finished: set[int] = set()
        self._gave_up: str | None = None
        """How a choice ended that is not finished."""
        self._tool_calls: set[tuple[int, int]] = set()
        self._usage: Usage | None = None
        self.model: str | None = None
        """The model name that the engine answered with."""
        self.contradiction: str | None = None
        """Why the reply as it came cannot be the reply to the request, as
        :func:`bridle.store.writing.integrity.contradiction` has it."""

    def events(self, payload: bytes) -> list[Event]:
        """Events of one chunk, or of a whole non-streamed body.

        Raises :class:`ApiError` when the payload is malformed or reports an error.
        """
        cut = None
        if len(payload) >= WORTH_CUTTING:
            payload, cut = cut_prompt_ids(payload, self._read_prompt)
        try:
            body = self._decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise malformed(str(error)) from error
        if body.error is not None:
            raise stream_error(body.error)
        if body.usage is not None:
            self._usage = _usage(body.usage)
        if body.model is not None:
            self.model = body.model
        events: list[Event] = []
        if not self._started:
            self._started = True
            prompt: list[int] | TokenIds | str | None = body.prompt_token_ids
            if prompt is None and body.choices:
                prompt = body.choices[0].prompt_token_ids
            if isinstance(prompt, str):
                if cut is None or prompt != PLACEHOLDER:
                    raise malformed("prompt_token_ids is a text")
                prompt = cut
            events.append(Started(None if prompt is None else len(prompt), prompt))
        for choice in body.choices:
            index = choice.index
            if index >= self._choices or index in self._finished:
                self._contradict(choice)
            if choice.token_ids or choice.logprobs is not None:
                events.append(self._tokens(choice))
            text = choice.delta or choice.message
            if text is not None:
                reasoning = text.reasoning or text.reasoning_content
                if reasoning:
                    events.append(ReasoningDelta(reasoning, index))
                if text.content:
                    events.append(TextDelta(text.content, index))
                if text.tool_calls:
                    for position, call in enumerate(text.tool_calls):
                        events.append(self._tool_call(call, position, index))
            if choice.text:
                events.append(TextDelta(choice.text, index))
            if choice.finish_reason is not None:
                events += self._finish(choice)
        return events

    def _contradict(self, choice: _Choice[Any]) -> None:
        """Notes a choice that the request did not ask for, and output after a choice's end."""
        if choice.index >= self._choices:
            found = f"choice_not_asked_for: number {choice.index} of {self._choices} choices"
        elif choice.token_ids or choice.text or _says(choice.delta or choice.message):
            found = f"output_after_finish: choice {choice.index}"
        else:
            return
        self.contradiction = self.contradiction or found

    def last_events(self) -> list[Event]:
        """The usage, which is whole only now.

        Raises :class:`ApiError` when the reply was cut short."""
        if len(self._finished) < self._choices:
            message = "the engine's reply ended before it was finished"
            if self._gave_up is not None:
                message = f"the engine ended the reply with {self._gave_up!r}"
            raise ApiError("upstream_error", message, status=502)
        return [] if self._usage is None else [self._usage]

    def _tokens(self, choice: _Choice[Any]) -> Tokens:
        ids = choice.token_ids or []
        given = choice.logprobs
        if given is None:
            return Tokens(ids, [], choice.index)
        if given.content is not None:
            if self._detail:
                try:
                    values = [float(entry["logprob"]) for entry in given.content]
                except (KeyError, TypeError, ValueError) as error:
                    raise malformed("a logprobs entry without its logprob") from error
                return Tokens(ids, values, choice.index, given.content)
            return Tokens(ids, [entry.logprob for entry in given.content], choice.index)
        plain = given.token_logprobs or []
        values = [value for value in plain if value is not None]
        detail = _completion_detail(given) if self._detail else None
        return Tokens(ids, values, choice.index, detail)

    def _tool_call(self, call: _ToolCall, position: int, choice: int) -> ToolCallDelta:
        index = position if call.index is None else call.index
        function = call.function or _Function()
        key = (choice, index)
        minted = None
        if key not in self._tool_calls:
            minted = self._minted.tool_call_id(len(self._tool_calls), self._prefix)
            self._tool_calls.add(key)
        return ToolCallDelta(
            index,
            minted,
            (function.name or "") if minted else None,
            function.arguments or "",
            choice,
            (call.id or None) if minted else None,
        )

    def _finish(self, choice: _Choice[Any]) -> list[Event]:
        """Nothing for an engine that gave the choice up (``abort``): its tokens are kept, and
        :meth:`last_events` raises."""
        reason = _FINISH_REASONS.get(choice.finish_reason or "")
        if reason is None:
            self._gave_up = choice.finish_reason
            return []
        if choice.index < self._choices:
            self._finished.add(choice.index)
        stop = choice.stop_reason
        return [Finished(reason, choice.index, stop if isinstance(stop, str) else None)]


def _says(text: _Text | None) -> bool:
    if text is None:
        return False
    return bool(text.content or text.reasoning or text.reasoning_content or text.tool_calls)


def _completion_detail(given: _Logprobs[Any]) -> list[Mapping[str, Any]]:
    """Completions' parallel lists as one entry per token."""
    tokens = given.tokens or []
    tops = given.top_logprobs or []
    return [
        {
            "token": tokens[position] if position < len(tokens) else "",
            "logprob": value,
            "top_logprobs": tops[position] if position < len(tops) else None,
        }
        for position, value in enumerate(given.token_logprobs or ())
    ]


def _usage(given: _Usage) -> Usage:
    cached = given.prompt_tokens_details
    reasoning = given.completion_tokens_details
    return Usage(
        prompt_tokens=given.prompt_tokens,
        completion_tokens=given.completion_tokens or 0,
        cached_tokens=(cached.cached_tokens or 0) if cached else 0,
        reasoning_tokens=(reasoning.reasoning_tokens or 0) if reasoning else 0,
    )


def malformed(detail: str) -> ApiError:
    return ApiError("upstream_error", f"the engine sent a malformed reply: {detail}", status=502)


def stream_error(error: Any) -> ApiError:
    """The error object that an engine put into a stream it had already begun."""
    message = error.get("message") if isinstance(error, Mapping) else None
    return ApiError("upstream_error", f"the engine failed: {message or 'no message'}", status=502)
