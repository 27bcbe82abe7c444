"""The one request and the one event stream that every dialect is translated to and from.

A dialect is pure: client bytes become a :class:`Request`; engine :data:`Event` values become client
bytes. The canonical shape is the chat completions shape, which is what engines speak; what a
provider has beyond it (signatures, item ids, cache marks) is kept as *anchors* or named in a note.
A non-streaming reply is the fold of the same events (``proxy/wire/fold.py``), so there is one path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Protocol

import msgspec
import numpy as np

from bridle.errors import BridleError
from bridle.store.records import Note, TokenIds

_IDENTIFIER: Final = re.compile(r"\b[a-z]+(?:_[a-z]+)+\b")

Role = Literal["system", "user", "assistant", "tool"]
DialectName = Literal["chat", "completions", "responses", "messages", "google"]
FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """A function call of an assistant message."""

    id: str
    name: str
    arguments: str
    """JSON text as the client sent it, or as the engine produced it."""


class Message(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One turn of the conversation in chat shape."""

    role: Role
    content: str | list[dict[str, Any]] | None = None
    """Text, or chat content parts (``{"type": "text", ...}``, ``{"type": "image_url", ...}``)."""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    anchors: tuple[str, ...] = ()
    """Opaque values minted by us that the harness echoed with this message: Responses item ids,
    encrypted reasoning, thinking signatures. Tool-call ids are not repeated here."""

    def to_chat(self) -> dict[str, Any]:
        """This message as an engine's chat template expects it (arguments stay JSON text)."""
        chat: dict[str, Any] = {"role": self.role}
        if self.content is not None or not self.tool_calls:
            chat["content"] = self.content if self.content is not None else ""
        if self.reasoning is not None:
            chat["reasoning"] = self.reasoning
        if self.tool_calls:
            chat["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            chat["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            chat["name"] = self.name
        return chat


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Sampling parameters as the client asked; ``None`` means that it did not say."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None


class Wants(msgspec.Struct, frozen=True, gc=False):
    """What the client asked to see of what is always recorded."""

    logprobs: bool = False
    top_logprobs: int = 0
    token_ids: bool = False
    stream_usage: bool = False


class Request(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A client's request, whatever its dialect."""

    dialect: DialectName
    model: str
    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    """Only for ``completions``."""
    tools: tuple[dict[str, Any], ...] = ()
    """Chat-shaped function tools: ``{"type": "function", "function": {...}}``."""
    tool_choice: Any = None
    """Chat-shaped: ``"auto"``, ``"none"``, ``"required"``, a named function, or ``None``."""
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    sampling: Sampling = Sampling()
    stream: bool = False
    wants: Wants = Wants()
    template_kwargs: dict[str, Any] | None = None
    """``chat_template_kwargs`` for the engine."""
    extra: Mapping[str, Any] = {}
    """Harmless fields that are forwarded to the engine as they are."""
    previous_response_id: str | None = None
    """Responses only: the stored response whose conversation comes before ``messages``."""
    context: Any = None
    """The dialect's own: what its emitter must echo. Opaque to everyone else."""
    names: Mapping[str, str] = {}
    """What the client calls the engine's parameters, where it is another name."""
    notes: tuple[Note, ...] = ()
    """What was converted or dropped in translation; each is counted."""
    history: Any = None
    """The messages as the next request of the conversation will find them known
    (:class:`bridle.proxy.dialects.chat.history.ParsedHistory`); ``None`` where that is not kept."""

    @property
    def template_arguments(self) -> dict[str, Any] | None:
        """``template_kwargs`` with what a reasoning effort is to a template. vLLM adds the same
        when it renders; a tail that is rendered here must not read differently."""
        effort = self.extra.get("reasoning_effort")
        if effort is None:
            return self.template_kwargs
        thinks = {"enable_thinking": effort != "none"}
        return thinks | (self.template_kwargs or {}) | {"reasoning_effort": effort}


class Started(msgspec.Struct, frozen=True, gc=False):
    """The engine has accepted the request; nothing sampled is visible yet."""

    prompt_tokens: int | None = None
    """Known at once under exact continuation or when the engine tells; else ``None``."""
    prompt_token_ids: Sequence[int] | TokenIds | None = None
    """The ids that the engine says it used, when it says so at once; long ones as an array."""


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    text: str
    choice: int = 0


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    text: str
    choice: int = 0


class ToolCallDelta(msgspec.Struct, frozen=True, gc=False):
    """A piece of a function call; the first piece has ``id`` (minted by us) and ``name``."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    choice: int = 0


class Tokens(msgspec.Struct, frozen=True, gc=False):
    """Sampled tokens of one engine chunk, in order, before the deltas that they produced."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    choice: int = 0
    detail: Sequence[Mapping[str, Any]] | None = None
    """The engine's ``logprobs.content`` entries, kept only when the client wants them."""


class Finished(msgspec.Struct, frozen=True, gc=False):
    reason: FinishReason
    choice: int = 0
    stop_sequence: str | None = None


class Usage(msgspec.Struct, frozen=True, gc=False):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


Event = Started | TextDelta | ReasoningDelta | ToolCallDelta | Tokens | Finished | Usage


class ChoiceReply(msgspec.Struct, gc=False):
    """The fold of one choice's events."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = []
    token_ids: list[int] = []
    logprobs: list[float] = []
    detail: list[Mapping[str, Any]] = []
    finish_reason: FinishReason | None = None
    stop_sequence: str | None = None


class Reply(msgspec.Struct, gc=False):
    """The fold of a whole event stream: what a non-streaming client gets, what the record keeps."""

    choices: list[ChoiceReply] = []
    usage: Usage | None = None
    prompt_token_ids: Sequence[int] | TokenIds | None = None


def plain_ids(ids: Sequence[int] | TokenIds | None) -> list[int] | None:
    """Ids as Python integers, for a JSON encoder."""
    return None if ids is None else np.asarray(ids, dtype=np.uint32).tolist()


class Minted(msgspec.Struct, frozen=True, gc=False):
    """The opaque values that one call's reply carries, all derived from its call id.

    A harness echoes them, and ``proxy/wire/minting.py`` reads the call id back out of any of them.
    """

    call_id: str
    created: int
    """Seconds since the epoch, as providers' replies carry it."""
    response_id: str
    """``chatcmpl-…``, ``resp_…`` or ``msg_…`` by dialect."""
    model: str
    """The model name that the client asked for, answered back to it."""

    def item_id(self, kind: str, index: int) -> str:
        """Id of the ``index``-th output item: ``kind`` is the provider's prefix (``msg``, ``fc``,
        ``rs``)."""
        return f"{kind}_{self.call_id.removeprefix('call_')}{index:02d}"

    def tool_call_id(self, index: int, prefix: str = "call") -> str:
        return f"{prefix}_{self.call_id.removeprefix('call_')}{index:02d}"

    def signature(self, index: int) -> str:
        """Value for thinking signatures and encrypted reasoning content."""
        return f"bridle.{self.call_id.removeprefix('call_')}{index:02d}"


class ApiError(BridleError):
    """A failure in provider-neutral terms; each dialect writes it in its own shape.

    ``kind`` is one of: ``invalid_request``, ``authentication``, ``permission``, ``not_found``,
    ``too_large``, ``context_overflow``, ``rate_limit``, ``budget``, ``overloaded``,
    ``upstream_unreachable``, ``upstream_timeout``, ``upstream_error``, ``store_unavailable``,
    ``internal``.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        status: int,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.status = status
        self.param = param
        self.retry_after = retry_after

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """The error in the client's ``names`` of the engine's parameters; those that are English
        words stay in the message."""
        if not names or self.kind != "invalid_request":
            return self
        message = _IDENTIFIER.sub(lambda found: names.get(found[0], found[0]), self.message)
        param = None if self.param is None else names.get(self.param, self.param)
        return ApiError(
            self.kind, message, status=self.status, param=param, retry_after=self.retry_after
        )


class HttpError(msgspec.Struct, frozen=True):
    """An error as it goes to the client."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


class Emitter(Protocol):
    """Writes one streamed reply. Called in this order: ``begin``, ``event``…, then ``end`` or
    ``fail``. Everything that tells the client that the reply is complete is in ``end``, because it
    may leave only after the call has been committed. When that commit fails, the bytes of ``end``
    are thrown away and ``fail`` is called after it. ``keep_alive`` may come at any time after
    ``begin`` and before the last bytes."""

    def begin(self) -> bytes: ...
    def event(self, event: Event) -> bytes: ...
    def keep_alive(self) -> bytes:
        """A real protocol event that resets the client's idle timer and changes nothing."""
        ...

    def end(self) -> bytes: ...
    def fail(self, error: ApiError) -> bytes:
        """The provider's mid-stream error."""
        ...


class Dialect(Protocol):
    """A provider's wire API. Pure: no I/O, no clocks, no randomness."""

    name: DialectName
    stream_content_type: str
    """An emitter that has a ``content_type`` of its own knows better."""
    stream_failures: frozenset[str]
    """Kinds of :class:`ApiError` that this provider's clients understand only inside a stream: to
    a streaming request they are answered with status 200, ``begin`` and ``fail``."""

    def parse(self, body: bytes, path: Mapping[str, str], query: Mapping[str, str]) -> Request:
        """Raises :class:`ApiError` (``invalid_request``) naming the offending field.

        ``path`` holds the route's parameters (Google puts the model and the method there).
        """
        ...

    def mint(self, call_id: str, created: int, model: str) -> Minted: ...
    def emitter(self, request: Request, minted: Minted) -> Emitter: ...
    def reply(self, request: Request, minted: Minted, reply: Reply) -> bytes: ...
    def error(self, error: ApiError) -> HttpError: ...
