"""The request, the events and the reply that every dialect is translated to and from.

A dialect turns a client's bytes into a :class:`Request`, and :data:`Event` values into
client bytes. The canonical shape is that of chat completions, which engines use. What a provider
has beyond it (signatures, item ids, cache marks) is kept as *anchors* or named in a note. A
non-streaming reply is the fold of the same events (``proxy/wire/fold.py``). All types here are
plain data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from bridle.errors import BridleError
from bridle.store.records import Message as Message
from bridle.store.records import Note, TokenIds, VersionRun
from bridle.store.records import Role as Role
from bridle.store.records import ToolCall as ToolCall

_IDENTIFIER: Final = re.compile(r"\b[a-z]+(?:_[a-z]+)+\b")

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Sampling parameters of the client's request; ``None`` where the request has none."""

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
    """The recorded data that the client's reply contains, and their form."""

    logprobs: bool = False
    top_logprobs: int = 0
    token_ids: bool = False
    stream_usage: bool = False
    reasoning: bool = True


class Request(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A client's request, whatever its dialect."""

    dialect: str
    """The dialect's name."""
    model: str
    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    """The prompt as text or token ids, for a request that has no messages."""
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
    """Id of the recorded reply whose conversation comes before ``messages``."""
    references: tuple[str, ...] = ()
    """Ids of recorded items that the request names but does not contain."""
    instructions: bool = False
    """True if ``messages[0]`` is instructions that a request which continues this one does not
    inherit."""
    own: Any = None
    """The fields that only requests of this dialect have, for its emitter and reply."""
    names: Mapping[str, str] = {}
    """The client's names of the engine's parameters, by the engine's name, where they differ."""
    notes: tuple[Note, ...] = ()
    """Notes on everything that was converted or dropped in translation; each is counted."""

    @property
    def template_arguments(self) -> dict[str, Any] | None:
        """The ``template_kwargs`` with the arguments that stand for a reasoning effort.

        vLLM adds the same ones when it renders, and a tail that is rendered here must be equal to
        its own.
        """
        effort = self.extra.get("reasoning_effort")
        if effort is None:
            return self.template_kwargs
        thinks = {"enable_thinking": effort != "none"}
        return thinks | (self.template_kwargs or {}) | {"reasoning_effort": effort}


class Started(msgspec.Struct, frozen=True, gc=False):
    """The engine has accepted the request; nothing sampled is visible yet."""

    prompt_tokens: int | None = None
    """``None`` until the engine reports it."""
    prompt_token_ids: Sequence[int] | TokenIds | None = None
    """The ids that the engine used, where it reports them at the start; long ones as an array."""


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
    engine_id: str | None = None
    """The engine's own id of the call, on its first piece."""
    extra: Mapping[str, Any] | None = None
    """Opaque fields of the upstream's call (``extra_content``), which it may demand back."""


class Opaque(msgspec.Struct, frozen=True, gc=False):
    """Opaque fields of the upstream's message (``reasoning_details``), which it may demand back.

    The lists of several such events are one list.
    """

    fields: Mapping[str, Any]
    choice: int = 0


Detail = Sequence[Mapping[str, Any] | msgspec.Raw]
"""The engine's ``logprobs.content`` entries: JSON objects, mostly in the upstream's own bytes."""


def joined(detail: Detail) -> bytes:
    """Return the entries as one JSON array, in the upstream's own bytes where there are any."""
    encode = msgspec.json.encode
    parts = (entry if isinstance(entry, msgspec.Raw) else encode(entry) for entry in detail)
    return b"[%b]" % b",".join(parts)


def entries_of(detail: Detail, kind: type[Any] = dict[str, Any]) -> list[Any]:
    """Return the entries, each as a ``kind``, for a dialect that shows them in another form."""
    return msgspec.json.Decoder(list[kind]).decode(joined(detail))  # type: ignore[valid-type]


class Tokens(msgspec.Struct, frozen=True, gc=False):
    """Sampled tokens of one engine chunk, in order, before the deltas that they produced."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """NaN for a token that the engine gave no usable logprob."""
    choice: int = 0
    detail: Detail | None = None
    """Kept only when the client wants it."""
    kept: Sequence[Sequence[int]] = ()
    """The ids that each token was drawn from; empty if the engine did not report them."""


class Finished(msgspec.Struct, frozen=True, gc=False):
    reason: FinishReason
    choice: int = 0
    stop_sequence: str | None = None
    routed_experts: str | None = None
    """The experts of the choice, as the engine wrote them (``proxy/recording/token_facts.py``)."""


class Usage(msgspec.Struct, frozen=True, gc=False):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    cache_written_tokens: int | None = None
    """Prompt tokens that the upstream wrote to its cache; ``None`` if it reports none."""
    draft_tokens: int | None = None
    """Tokens that speculative decoding drafted; ``None`` if the engine does not report it."""
    accepted_draft_tokens: int | None = None
    """The drafted tokens that the model accepted."""


Event = Started | TextDelta | ReasoningDelta | ToolCallDelta | Opaque | Tokens | Finished | Usage


class ChoiceReply(msgspec.Struct, frozen=True, gc=False):
    """The fold of one choice's events."""

    text: str = ""
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    detail: Detail = ()
    finish_reason: FinishReason | None = None
    stop_sequence: str | None = None
    opaque: Mapping[str, Any] = {}
    """Opaque fields of the message, as in :class:`Opaque`."""
    versions: Sequence[VersionRun] = ()
    """The policy versions of the tokens."""
    kept: Sequence[Sequence[int]] = ()
    """The ids that each token was drawn from; empty if the engine reported none."""
    routed_experts: str | None = None
    """The experts of the choice, as the engine wrote them."""


class Reply(msgspec.Struct, frozen=True, gc=False):
    """The fold of a whole event stream: a non-streaming client gets it, and the record keeps it."""

    choices: Sequence[ChoiceReply] = ()
    usage: Usage | None = None
    prompt_token_ids: Sequence[int] | TokenIds | None = None


def prefilled(reply: Message, prefill: str) -> Message:
    """Return the ``reply`` after the beginning that its request gave it, as a client repeats it."""
    if not prefill:
        return reply
    text = reply.content if isinstance(reply.content, str) else ""
    return msgspec.structs.replace(reply, content=prefill + text)


def plain_ids(ids: Sequence[int] | TokenIds | None) -> list[int] | None:
    """Return ids as Python integers, for a JSON encoder."""
    return None if ids is None else np.asarray(ids, dtype=np.uint32).tolist()


class Minted(msgspec.Struct, frozen=True, gc=False):
    """The opaque values that one call's reply carries, all derived from its call id.

    A harness echoes them, and ``proxy/wire/minting.py`` finds the call id in each of them.
    """

    call_id: str
    created: int
    """Seconds since the epoch, as providers' replies carry it."""
    response_id: str
    """``chatcmpl-…``, ``resp_…`` or ``msg_…`` by dialect."""
    model: str
    """The model name of the client's request, which its reply repeats."""

    def item_id(self, kind: str, index: int) -> str:
        """Return the id of the ``index``-th output item.

        ``kind`` is the provider's prefix (``msg``, ``fc``, ``rs``).
        """
        return f"{kind}_{self.call_id.removeprefix('call_')}{index:02d}"

    def tool_call_id(self, index: int, prefix: str = "call") -> str:
        return f"{prefix}_{self.call_id.removeprefix('call_')}{index:02d}"

    def signature(self, index: int) -> str:
        """Return the value for thinking signatures and encrypted reasoning content."""
        return f"bridle.{self.call_id.removeprefix('call_')}{index:02d}"


class Overflow(NamedTuple):
    """The numbers of a context overflow; each is ``None`` where it is not known."""

    prompt: int | None = None
    output: int | None = None
    """Number of output tokens that the client asked for."""
    limit: int | None = None


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
        details: Mapping[str, Any] | None = None,
        overflow: Overflow | None = None,
    ) -> None:
        """``details`` holds the fields of a dialect's error object that programs read.

        ``overflow`` holds the numbers of a context overflow, if the upstream gave them beside its
        message.
        """
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.status = status
        self.param = param
        self.retry_after = retry_after
        self.details = details
        self.overflow = overflow
        self.passed: HttpError | None = None
        """The upstream's own refusal, for a client that gets it as it is."""

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """Return the error with the client's ``names`` of the engine's parameters.

        Names that are English words stay as they are in the message.
        """
        if not names or self.kind != "invalid_request":
            return self
        message = _IDENTIFIER.sub(lambda found: names.get(found[0], found[0]), self.message)
        param = None if self.param is None else names.get(self.param, self.param)
        return self.worded(message, param)

    def hinted(self, hint: str) -> ApiError:
        """Return the error with ``hint`` after its message.

        The hint is added if an engine refused the messages or named no field.
        """
        if not hint or self.kind != "invalid_request" or self.param not in (None, "messages"):
            return self
        return self.worded(f"{self.message} {hint}", self.param)

    def worded(self, message: str, param: str | None, kind: str | None = None) -> ApiError:
        """Return the error with other words, and of another ``kind`` if one is given."""
        return ApiError(
            kind or self.kind,
            message,
            status=self.status,
            param=param,
            retry_after=self.retry_after,
            details=self.details,
            overflow=self.overflow,
        )


class HttpError(msgspec.Struct, frozen=True):
    """An error as it is sent to the client."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


class Emitter(Protocol):
    """Writes one streamed reply.

    Called in this order: ``begin``, ``event``…, then ``end`` or ``fail``. Everything that marks the
    reply as complete is in ``end``, because it may leave only after the call has been committed.
    When that commit fails, the bytes of ``end`` are discarded and ``fail`` is called after it.
    ``keep_alive`` may be called at any time after ``begin`` and before the last bytes.
    """

    @property
    def content_type(self) -> str: ...
    def begin(self) -> bytes: ...
    def event(self, event: Event) -> bytes: ...
    def keep_alive(self) -> bytes:
        """Return a valid protocol event that resets the client's idle timer and changes nothing."""
        ...

    def end(self) -> bytes: ...
    def fail(self, error: ApiError) -> bytes:
        """Return the provider's mid-stream error."""
        ...


Parse = Callable[[bytes, Mapping[str, str], Mapping[str, str]], Request]
"""A function from body, path and query to a request. ``path`` holds the route's parameters (Google
puts the model and the method there). It raises :class:`ApiError` (``invalid_request``) that names
the field."""
