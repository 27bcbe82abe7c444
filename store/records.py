"""The records that the store holds, as plain values that every room uses.

Identifiers are lower-case text made by :func:`new_id`; identifiers made at about the same time
begin alike, which keeps indexes compact. A *call* is one model request and its reply, a *session*
is everything recorded under one session key.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from bridle.store.declaration import SHORT_TEXT, Codec, Fact

TokenIds = NDArray[np.uint32]
Logprobs = NDArray[np.float32]
RoutedExperts = NDArray[np.uint8] | NDArray[np.uint16]
"""The experts that an engine chose, ``[T, layers, top_k]``: row ``t`` is of the position that token
``t`` was predicted from, which is that of token ``t - 1``. A layer without experts has zeros. So a
reply's rows are known when it ends, although its last token was never computed, and a span in the
middle of a path needs no row of its neighbours."""


def token_array(ids: Sequence[int] | TokenIds) -> TokenIds:
    """Return the ids as ``uint32[T]``. Raise ``OverflowError`` for an id outside ``uint32``."""
    if isinstance(ids, np.ndarray):
        return ids.astype(np.uint32, copy=False)
    # NumPy asks every element for its type first.
    return np.frombuffer(array("I", ids), dtype=np.uint32)


def new_id(prefix: str) -> str:
    """Return a unique identifier: ``prefix_`` and 24 characters.

    The characters hold 50 bits of milliseconds and 70 random bits. The alphabet is lower-case base
    32, so that the identifier can travel inside tool-call ids, headers and paths of every provider.
    """
    now = int(time.time() * 1000)
    when = "".join([_PAIRS[now >> shift & 1023] for shift in (40, 30, 20, 10, 0)])
    chance = os.urandom(_RANDOM_CHARACTERS).translate(_AS_TEXT).decode("ascii")
    return f"{prefix}_{when}{chance}"


_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz234567"
"""The alphabet of RFC 4648's base 32, in lower case."""
_PAIRS: Final = [first + second for first in _ALPHABET for second in _ALPHABET]
_AS_TEXT: Final = bytes(ord(_ALPHABET[byte & 31]) for byte in range(256))
_RANDOM_CHARACTERS: Final = 14


_all: Final = np.logical_and.reduce
MISSING_LOGPROB: Final = -9999.0
"""The value that vLLM and OpenAI write for a logprob that they do not have."""


def logprob_array(logprobs: Sequence[float]) -> Logprobs:
    """Return the logprobs as ``float32[T]``, rounded as IEEE 754 does.

    NaN stands for a token without a usable logprob, which includes logprobs that are infinite or at
    most :data:`MISSING_LOGPROB`.
    """
    scores = np.frombuffer(array("f", logprobs), dtype=np.float32)
    usable = (scores > MISSING_LOGPROB) & (scores < np.inf)
    return scores if _all(usable) else np.where(usable, scores, np.float32(np.nan))


class Continuation(StrEnum):
    """The way in which a session's prompts are made.

    They are made from recorded ids, or by rendering the messages again.
    """

    EXACT = "exact"
    RENDERED = "rendered"


class CallStatus(StrEnum):
    """The state of a call. Only ``COMPLETE`` and ``PARTIAL`` calls carry trainable tokens."""

    OPEN = "open"
    """The call has begun and not ended. It runs now, or its process crashed and the call is not
    marked as ``INTERRUPTED`` yet."""
    COMPLETE = "complete"
    PARTIAL = "partial"
    """The client or the engine cut the call. The tokens that arrived are kept, because the harness
    may use them."""
    FAILED = "failed"
    """No token arrived: the call was refused or invalid, or the engine could not be reached."""
    QUARANTINED = "quarantined"
    """The reply's ids, logprobs and usage contradict each other. The call is kept and never trained
    on."""
    INTERRUPTED = "interrupted"
    """The process that ran the call died; the call is marked when a writer finds it."""


AGENTS_OWN: Final = frozenset({"budget", "context_overflow", "invalid_request"})
"""Reasons of failed calls for which the agent's request is to blame, and not the engine or the
proxy."""
CLIENT_DISCONNECTED: Final = "client_disconnected"
"""The reason of a call whose client did not wait for its end."""


class CallKind(StrEnum):
    """The purpose of a call. ``UNKNOWN`` until there is evidence."""

    MAIN = "main"
    SUBAGENT = "subagent"
    COMPACTION = "compaction"
    SIDE = "side"
    RETRY = "retry"
    COUNT = "count"
    UNKNOWN = "unknown"


BESIDE: Final = frozenset({CallKind.SIDE, CallKind.COUNT, CallKind.COMPACTION, CallKind.SUBAGENT})
"""The kinds of calls that are no steps of the agent's own conversation."""


class BreakReason(StrEnum):
    """The reason why a call that continues another in meaning does not continue it in tokens."""

    REASONING_DROPPED = "reasoning_dropped"
    TEMPLATE_REWROTE_HISTORY = "template_rewrote_history"
    ARGUMENTS_RESERIALISED = "arguments_reserialised"
    RETOKENISED = "retokenised"
    SYSTEM_CHANGED = "system_changed"
    TOOLS_CHANGED = "tools_changed"
    COMPACTED = "compacted"
    EDITED = "edited"
    REWORDED = "reworded"
    """The harness put the parent's reply into words of its own."""
    TRUNCATED = "truncated"
    TAIL_NOT_LOCAL = "tail_not_local"
    """The template does not render a turn on its own, so the history was rendered in full."""
    TOKENIZER_DIFFERS = "tokenizer_differs"
    """The engine has another tokenizer or template than the proxy was given."""
    ENGINE_RENDERS_OTHERWISE = "engine_renders_otherwise"
    """The engine's prompts differ from those that the proxy renders of the same messages."""
    PARENT_WITHOUT_IDS = "parent_without_ids"
    """The parent call has no token ids (an external upstream, or a quarantined record)."""
    UNEXPLAINED = "unexplained"
    """The reason of a break that only the ids show, until the record is judged."""


CONSTRAINED: Final = "constrained_by_grammar"
"""Name of the note on a call whose reply was constrained by a grammar. Where an engine masks its
logits for that (vLLM does), the logprobs are of the distribution that the grammar allowed and not
of the policy alone."""

TOOL_CALLS_UNREAD: Final = "tool_calls_unread"
"""Name of the note on a call whose reply has tool calls as text; its detail is their markup."""

RENDERS_OTHERWISE: Final = BreakReason.ENGINE_RENDERS_OTHERWISE.value
"""Name of the note on a session's first call whose prompt differs from the proxy's rendering of the
same messages; its detail shows the first difference."""

IDS_MISSING: Final = "no_token_ids"
"""Name of the note on a call whose engine returned text without the ids of its tokens."""

IMPORTED: Final = "imported"
"""Label of a session whose conversation another program recorded, and name of the note on its
calls. The value is the format of the file."""

LOGPROBS_MISSING: Final = "logprobs_missing"
"""Name of the note on a call with sampled tokens for which the engine gave no usable logprob."""

ALSO_BROKE_ON: Final = "also_broke_on"
"""Name of the note for each further reason of a break, after that of the first difference. It is
part of the judgement and not stored."""


OBSERVED: Final = -1
"""Used in place of a choice's index for tokens and messages that belong to the call's request, not
to a sampled reply."""


class SpanKind(StrEnum):
    OBSERVED = "observed"
    """Tokens that the engine was given: rendered prompt text."""
    SAMPLED = "sampled"
    """Tokens that the policy produced, each with its logprob."""


@dataclass(frozen=True, slots=True)
class Note:
    """A named, countable event on a call: something was dropped, converted, weakened or retried."""

    name: str
    """Stable snake_case word; the label of the counter in ``/metrics``."""
    detail: str = ""


DEFAULT_POLICY: Final = "policy"
"""Name of the policy that a call asks when it names no other. A proxy may serve further policies,
each with weights and versions of its own; all of them share one tokenizer and chat template."""

FROZEN: Final = "model_frozen"
"""Name of the note on a call that a model other than the policy answered; such a call is never
trained on."""


def is_frozen(notes: Iterable[Note]) -> bool:
    return any([note.name == FROZEN for note in notes])


class VersionRun(msgspec.Struct, frozen=True, gc=False):
    """A run of sampled tokens of one policy version.

    ``version`` sampled the tokens from ``start`` (0-based, within the sampled ids) up to the next
    run.
    """

    start: int
    version: int


@dataclass(frozen=True, kw_only=True)
class StartFacts:
    """The start of a session's harness. Fields are ``None`` where they are not known."""

    argv: Annotated[tuple[str, ...] | None, Fact("The command of the harness")] = None
    folder: Annotated[str | None, Fact("The folder in which the harness was started")] = None
    home: Annotated[str | None, Fact("The harness's `HOME`")] = None
    tz: Annotated[str | None, Fact("The harness's `TZ`")] = None
    environment_names: Annotated[
        tuple[str, ...] | None, Fact("The names of its environment's variables, never values")
    ] = None
    harness_version: Annotated[str | None, Fact("The installed version of the harness")] = None
    workspace_commit: Annotated[
        str | None, Fact("The Git commit that was checked out in the folder")
    ] = None


@dataclass(frozen=True, slots=True)
class SessionRecord(StartFacts):
    """One run of one harness on one task: the declaration of the table ``sessions``."""

    id: Annotated[str, Fact("The session's id", size=64, key=True)]
    created_at: Annotated[float, Fact("The time of its creation", time=True)]
    run_id: Annotated[
        str | None, Fact("The run that the session belongs to", size=64, references="runs.id")
    ] = None
    task_suite: Annotated[str | None, Fact("The suite of the task", size=SHORT_TEXT)] = None
    task_split: Annotated[str | None, Fact("The split of the task", size=32)] = None
    task_id: Annotated[
        str | None, Fact("The task's own id, unique within the suite and split", size=SHORT_TEXT)
    ] = None
    group_id: Annotated[
        str | None,
        Fact("The group, whose sessions the trainer compares with each other", size=SHORT_TEXT),
    ] = None
    harness: Annotated[str | None, Fact("The name of the harness", size=SHORT_TEXT)] = None
    name: Annotated[
        str | None,
        Fact("The name that people use for the session, as in `/s/NAME/…`", size=256, unique=True),
    ] = None
    key_hash: Annotated[
        str | None, Fact("SHA-256 of the session key", size=64, unique=True, shown=False)
    ] = None
    """Hex; the key itself is never stored."""
    verifier_key_hash: Annotated[
        str | None, Fact("SHA-256 of the key that scores the session", size=64, shown=False)
    ] = None
    expires_at: Annotated[
        float | None, Fact("The time from which the key is refused", time=True)
    ] = None
    continuation: Annotated[
        Continuation, Fact("How prompts are made: `exact` or `rendered`", size=16)
    ] = Continuation.EXACT
    vocabulary: Annotated[
        str | None,
        Fact("The vocabulary of its tokens: a digest, by which the store has their texts", size=64),
    ] = None
    settings: Annotated[
        Mapping[str, Any],
        Fact("Sampling parameters that are pinned or capped, and budgets", shown=False),
    ] = field(default_factory=dict)
    labels: Annotated[Mapping[str, Any], Fact("Labels of the session's owner")] = field(
        default_factory=dict
    )
    sealed_at: Annotated[float | None, Fact("The time of its end", time=True)] = None
    outcome: Annotated[
        str | None,
        Fact("The outcome: `completed`, `timeout`, `error` …; null while it is open", size=32),
    ] = None
    origin_session_id: Annotated[
        str | None, Fact("The recorded session that this one re-enters", size=64)
    ] = None
    origin_call_id: Annotated[
        str | None,
        Fact("The recorded call at which it goes on live; NULL: after the last one", size=64),
    ] = None

    def __post_init__(self) -> None:
        known = [part is not None for part in (self.task_suite, self.task_split, self.task_id)]
        if any(known) and not all(known):
            raise ValueError(f"session {self.id}: a task is named by its suite, split and id")


Role = Literal["system", "user", "assistant", "tool"]

MESSAGE_FIELDS: Final = "message"
"""Key in :attr:`ToolCall.extra` of the opaque fields of the whole message."""


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A call of a tool, as the assistant wrote it."""

    id: str
    name: str
    arguments: str
    """JSON text as the client sent it, or as the engine produced it."""
    engine_id: str | None = None
    """The engine's own id of a tool call that it sampled; ``id`` is the one that was sent to the
    client."""
    extra: Mapping[str, Any] | None = None
    """Opaque fields that an upstream sent with the call and may demand back (``extra_content``).
    The first call of a message also holds the message's own fields, under
    :data:`MESSAGE_FIELDS`."""

    @property
    def own_extra(self) -> dict[str, Any]:
        """The content of :attr:`extra` without the message's fields."""
        extra = self.extra or {}
        return {name: value for name, value in extra.items() if name != MESSAGE_FIELDS}


class Message(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One message of a conversation in chat shape."""

    role: Role
    content: str | list[dict[str, Any]] | None = None
    """Text, or chat content parts (``{"type": "text", ...}``, ``{"type": "image_url", ...}``)."""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    anchors: tuple[str, ...] = ()
    """Opaque values minted by the proxy that the harness echoed with this message: Responses item
    ids, encrypted reasoning, thinking signatures. Tool-call ids are not repeated here. Lineage uses
    them while the request is admitted; they are not stored."""

    def to_chat(self) -> dict[str, Any]:
        """Return this message as an engine's chat template expects it.

        Arguments stay JSON text.
        """
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


class RequestDigests(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A request in digests of 16 bytes, by which lineage compares requests."""

    system: bytes
    """The digest of the leading system messages."""
    system_form: bytes
    """The digest of their written form."""
    tools: bytes
    ask: bytes
    """The digest of everything else that makes two requests the same question: tool choice,
    response format, prefill."""
    units: tuple[bytes, ...]
    """The digests of the steps after the base's reply (of all steps if there is no base)."""
    forms: tuple[bytes, ...]
    """The digest of the written form of each of these steps."""
    depth: int
    """Number of steps of the whole request, those before the base's reply included."""
    agent: str | None = None
    """The harness's own name of the (sub-)agent, if its headers give one."""
    arguments: str | None = None
    """The arguments of the chat template besides messages and tools, as JSON; ``None`` if there are
    none."""
    prefill: str = ""
    """The beginning of the reply, which the request has as its last message. It does not count as a
    step of the request, because a later request repeats it and the reply as one message."""


_PACKED_DIGESTS: Final = Codec(
    msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(RequestDigests).decode
)


class LineageState(msgspec.Struct, frozen=True, gc=False):
    """The recorded reply that a request continues.

    Lineage found it when the request was admitted. Its fields are columns of ``calls``.
    """

    digests: Annotated[
        RequestDigests,
        Fact(
            "The request in digests, as MessagePack",
            shown=False,
            nullable=True,
            codec=_PACKED_DIGESTS,
        ),
    ]
    base_call_id: Annotated[
        str | None,
        Fact(
            "The deepest call whose whole conversation stands unchanged at the start of the "
            "request",
            size=64,
            shown=False,
        ),
    ] = None
    base_choice: Annotated[
        int, Fact("The index of the base's reply that is continued", shown=False, nullable=True)
    ] = 0
    differs: Annotated[
        tuple[str, ...],
        Fact(
            "Ways in which the harness rewrote what it echoes of the base, such as `reasoning`",
            shown=False,
            nullable=True,
        ),
    ] = ()
    confidence: Annotated[
        float,
        Fact(
            "The confidence in the base: 1.0 if an echoed id names the parent",
            shown=False,
            nullable=True,
        ),
    ] = 1.0


class Conversation(msgspec.Struct, frozen=True, gc=False):
    """The messages and tools of a request.

    The whole conversation is that of its base, then the base's reply, then ``tail``.
    """

    tail: tuple[Message, ...]
    """The messages after the base's reply; all messages if there is no base."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The definitions of the tools that the model had."""
    length: int = 0
    """Number of messages of the whole request, those before ``tail`` included."""
    instructions: bool = False
    """True if the first message is a Responses request's ``instructions``."""
    lineage: LineageState | None = None


LogprobsOf = Literal["processed", "raw", "unknown"]
"""The distribution that the logprobs belong to. ``processed`` is the one that tokens were drawn
from, after temperature, truncation and the like; ``raw`` is the policy's before all of these."""


class Sampler(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The distribution that the sampled tokens of a call were drawn from.

    The defaults are the policy's own distribution. ``None`` means that the request left the value
    to the engine, whose default is not known.
    """

    logprobs: LogprobsOf = "unknown"
    """The distribution that the recorded logprobs belong to."""
    temperature: float | None = 1.0
    """The temperature. A value below 1e-5 means greedy decoding."""
    top_p: float | None = 1.0
    top_k: int | None = 0
    """The number of likeliest tokens to draw from; 0 means all tokens."""
    min_p: float | None = 0.0
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    repetition_penalty: float | None = 1.0
    grammar: str = ""
    """Names of the request fields that made the engine use constrained decoding, or "" if there are
    none."""
    unconstrained: int = 0
    """Number of the reply's first tokens that were sampled before the grammar began."""
    others: tuple[str, ...] = ()
    """Further parameters of the request that change the distribution, such as ``logit_bias``."""

    @property
    def label(self) -> str:
        """A short text of these settings, such as ``temperature 0.7, top_p 0.8``."""
        found = []
        for name in SAMPLER_PARAMETERS:
            value = getattr(self, name)
            if value is None:
                found.append(f"{name} unknown")
            elif value != getattr(PLAIN, name):
                found.append(f"{name} {value:g}")
        found += ["grammar"] if self.grammar else []
        return ", ".join((*found, *self.others)) or "temperature 1"


SAMPLER_PARAMETERS: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
"""The request parameters that define a sampler."""
PLAIN: Final = Sampler()
"""The policy's own distribution."""


class KeptTokens(msgspec.Struct, frozen=True, gc=False):
    """The sets of ids that ``T`` sampled tokens were drawn from, after top-k, top-p and min-p."""

    counts: TokenIds
    """The number of ids of each token's set, ``uint32[T]``; 0 if the set is not recorded."""
    ids: TokenIds
    """The ids of all sets, one set after another, ``uint32[sum(counts)]``."""

    @classmethod
    def of(cls, sets: Sequence[Sequence[int]]) -> Self:
        """Return the record of one set per token. Raise ``OverflowError`` as token_array does."""
        counts = np.fromiter(map(len, sets), np.uint32, len(sets))
        return cls(counts, token_array([each for one in sets for each in one]))

    def first(self, tokens: int) -> Self:
        """Return the sets of the first ``tokens`` tokens."""
        counts = self.counts[:tokens]
        return type(self)(counts, self.ids[: int(counts.sum(dtype=np.int64))])


class Choice(msgspec.Struct, frozen=True, gc=False):
    """One sampled sequence of a call (``n`` of them when the client asked for ``n``)."""

    token_ids: TokenIds
    """The engine's own ids, ``uint32[T]``, stop token included."""
    logprobs: Logprobs
    """The logprobs, ``float32[T]``, of the distribution that :attr:`Sampler.logprobs` names."""
    versions: tuple[VersionRun, ...]
    finish_reason: str | None
    kept: KeptTokens | None = None
    """The set that each token was drawn from; ``None`` if the engine reported none."""
    routed_experts: RoutedExperts | None = None
    """The experts behind each token; ``None`` if the engine reported none."""


class Span(msgspec.Struct, frozen=True, gc=False):
    """An edge of a session's token tree. It is only ever added, and never changed after its commit.

    A span is attached at the absolute token position ``start`` of its parent's path. If the parent
    reaches further than ``start``, this span branches off inside it.
    """

    id: str
    """The id: ``{call_id}.o`` for observed tokens, ``{call_id}.s{choice}`` for sampled ones."""
    session_id: str
    call_id: str
    parent_id: str | None
    start: int
    kind: SpanKind
    token_ids: TokenIds
    logprobs: Logprobs | None = None
    """The logprobs, ``float32[len(token_ids)]``, of sampled spans; ``None`` for others."""
    versions: tuple[VersionRun, ...] = ()
    kept: KeptTokens | None = None
    """The set that each token was drawn from; ``None`` if the engine reported none."""
    routed_experts: RoutedExperts | None = None
    """The experts behind each token; ``None`` if they are not known for all of them."""

    @property
    def end(self) -> int:
        """Absolute position after the last token."""
        return self.start + len(self.token_ids)


class Growth(msgspec.Struct, frozen=True, gc=False):
    """The spans that a call adds to its session's token tree."""

    prompt_span_id: str | None
    """The span in which the prompt ends; ``None`` for an empty or unknown prompt."""
    spans: tuple[Span, ...]
    shared: int = 0
    """Number of leading tokens that the prompt shares with the path that the call continues."""


def span_id(call_id: str, choice: int) -> str:
    """Return ``{call_id}.o`` for the observed tokens of a call, else ``{call_id}.s{choice}``."""
    return f"{call_id}.o" if choice == OBSERVED else f"{call_id}.s{choice}"


def span_place(identifier: str) -> tuple[str, int]:
    """Return the call and the choice that a :func:`span_id` names."""
    call_id, _, part = identifier.rpartition(".")
    return call_id, OBSERVED if part == "o" else int(part[1:])


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One job of Bridle that made sessions or weights: a proxy, a rollout, a training run."""

    id: str
    kind: str
    """The kind of job: ``proxy``, ``rollout``, ``train``, ``sft``, ``eval``, ``demo`` …"""
    started_at: float
    name: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    ended_at: float | None = None
    status: str = "running"
    """The state of the run: ``running``, then ``completed``, ``failed`` or ``stopped`` (by Ctrl-C
    or a signal). The latest attempt sets it, as well as ``ended_at`` and ``reason``."""
    reason: str | None = None
    """One line that says why the run failed or was stopped."""


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    run_id: str
    number: int
    """The number of the attempt, from 1."""
    started_at: float
    writer_id: str | None = None
    """The id, in the table of writers, of the process that runs the attempt."""
    ended_at: float | None = None
    status: str = "running"
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class AttemptBegun:
    """The start of a run, for the first time or again."""

    run: RunRecord
    """The run, which is added unless the store knows its id."""
    at: float


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """The end of a run."""

    run_id: str
    status: str
    """The final status: ``completed``, ``failed`` or ``stopped``."""
    at: float
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """A task that sessions are asked to do."""

    id: str
    """The task's own id, unique within the suite and split."""
    suite: str
    split: str
    """The name of the split: ``train``, ``eval`` … Tasks of one split are never used as those of
    another."""
    payload: Mapping[str, Any]
    created_at: float


@dataclass(frozen=True, slots=True)
class PolicyRecord:
    """Weights that a run has published to its engine."""

    run_id: str
    version: int
    published_at: float
    path: str | None = None
    digest: str | None = None
    verified: bool = False
    """True if the engine's logprobs were compared with the trainer's after the publish."""
    logprob_gap: float | None = None
    """Mean absolute difference found by that comparison, in nats."""
    name: str = DEFAULT_POLICY
    """The name of the policy. Each policy of a run counts its own versions."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of a training run."""

    run_id: str
    step: int
    name: str
    value: float
    at: float
