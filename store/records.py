"""What the store holds, as plain values: the words every room uses for a recorded call.

Identifiers are lower-case text made by :func:`new_id`; those of one time begin alike, which keeps
indexes together. A *call* is one model request and its reply, a *session* is everything recorded
under one session key.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from bridle.store.reward import FindingMode as FindingMode
from bridle.store.reward import Reward as Reward
from bridle.store.reward import RewardKind as RewardKind
from bridle.store.reward import RewardSource as RewardSource

TokenIds = NDArray[np.uint32]
Logprobs = NDArray[np.float32]

SHORT_TEXT: Final = 128
"""Characters at most of a name that a person or program chooses: of a task, a harness, a reward."""


def token_array(ids: Sequence[int] | TokenIds) -> TokenIds:
    """``uint32[T]``. Raises ``OverflowError`` for an id outside ``uint32``."""
    if isinstance(ids, np.ndarray):
        return ids.astype(np.uint32, copy=False)
    # NumPy asks every element for its type first.
    return np.frombuffer(array("I", ids), dtype=np.uint32)


def new_id(prefix: str) -> str:
    """A unique identifier ``prefix_`` + 24 characters: 50 bits of milliseconds, 70 random bits.

    The alphabet is lower-case base 32, so that the identifier can travel inside tool-call ids,
    headers and paths of every provider.
    """
    now = int(time.time() * 1000)
    when = "".join([_PAIRS[now >> shift & 1023] for shift in (40, 30, 20, 10, 0)])
    chance = os.urandom(_RANDOM_CHARACTERS).translate(_AS_TEXT).decode("ascii")
    return f"{prefix}_{when}{chance}"


_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz234567"
"""RFC 4648's base 32, in lower case."""
_PAIRS: Final = [first + second for first in _ALPHABET for second in _ALPHABET]
_AS_TEXT: Final = bytes(ord(_ALPHABET[byte & 31]) for byte in range(256))
_RANDOM_CHARACTERS: Final = 14


_all: Final = np.logical_and.reduce
MISSING_LOGPROB: Final = -9999.0
"""What vLLM and OpenAI write for a logprob that they do not have."""


def logprob_array(logprobs: Sequence[float]) -> Logprobs:
    """``float32[T]``, rounded as IEEE 754 does. NaN stands for a token without a usable logprob:
    one that is infinite or at most :data:`MISSING_LOGPROB`, too."""
    scores = np.frombuffer(array("f", logprobs), dtype=np.float32)
    usable = (scores > MISSING_LOGPROB) & (scores < np.inf)
    return scores if _all(usable) else np.where(usable, scores, np.float32(np.nan))


class Continuation(StrEnum):
    """How a session's prompts are made: from recorded ids, or by rendering the messages again."""

    EXACT = "exact"
    RENDERED = "rendered"


class CallStatus(StrEnum):
    """Where a call stands. Only ``COMPLETE`` and ``PARTIAL`` calls carry trainable tokens."""

    OPEN = "open"
    """Begun and not ended: running now, or found so after a crash (then ``INTERRUPTED``)."""
    COMPLETE = "complete"
    PARTIAL = "partial"
    """Cut by the client or the engine; tokens that arrived are kept: the harness may use them."""
    FAILED = "failed"
    """No token arrived: refused, invalid, or the engine was not to be had."""
    QUARANTINED = "quarantined"
    """The reply's ids, logprobs and usage contradict each other; kept, never trained on."""
    INTERRUPTED = "interrupted"
    """Open when the process that ran it died; marked at restart."""


AGENTS_OWN: Final = frozenset({"budget", "context_overflow", "invalid_request"})
"""Reasons of calls that failed by what the agent asked for, and not by the engine or the proxy."""
CLIENT_DISCONNECTED: Final = "client_disconnected"
"""Reason of a call whose client did not wait for its end."""


class CallKind(StrEnum):
    """What a call was for. ``UNKNOWN`` until there is evidence."""

    MAIN = "main"
    SUBAGENT = "subagent"
    COMPACTION = "compaction"
    SIDE = "side"
    RETRY = "retry"
    COUNT = "count"
    UNKNOWN = "unknown"


class BreakReason(StrEnum):
    """Why a call that continues another in meaning does not continue it in tokens."""

    REASONING_DROPPED = "reasoning_dropped"
    TEMPLATE_REWROTE_HISTORY = "template_rewrote_history"
    ARGUMENTS_RESERIALISED = "arguments_reserialised"
    RETOKENISED = "retokenised"
    SYSTEM_CHANGED = "system_changed"
    TOOLS_CHANGED = "tools_changed"
    COMPACTED = "compacted"
    EDITED = "edited"
    TRUNCATED = "truncated"
    TAIL_NOT_LOCAL = "tail_not_local"
    """The template does not render a turn on its own, so the history was rendered in full."""
    TOKENIZER_DIFFERS = "tokenizer_differs"
    """The engine has another tokenizer or template than the proxy was given."""
    ENGINE_RENDERS_OTHERWISE = "engine_renders_otherwise"
    """The engine's prompts are not what the proxy renders of the same messages."""
    PARENT_WITHOUT_IDS = "parent_without_ids"
    """The parent call has no token ids (an external upstream, or a quarantined record)."""
    UNEXPLAINED = "unexplained"


CONSTRAINED: Final = "constrained_by_grammar"
"""Name of the note on a call whose reply a grammar shaped: where an engine masks its logits for
that (vLLM does), its logprobs are of what the grammar allowed and not of the policy alone."""

TOOL_CALLS_UNREAD: Final = "tool_calls_unread"
"""Name of the note on a call whose reply has tool calls as text; its detail is their markup."""

RENDERS_OTHERWISE: Final = BreakReason.ENGINE_RENDERS_OTHERWISE.value
"""Name of the note on a session's first call whose prompt is not what the proxy renders of the same
messages; its detail shows the first difference."""

IDS_MISSING: Final = "no_token_ids"
"""Name of the note on a call whose engine returned text without the ids of its tokens."""

LOGPROBS_MISSING: Final = "logprobs_missing"
"""Name of the note on a call with sampled tokens of which the engine gave no usable logprob."""

ALSO_BROKE_ON: Final = "also_broke_on"
"""Name of the note for each further reason of a break, after the first difference's."""


OBSERVED: Final = -1
"""In place of a choice: what a call was given, and not what a choice of it sampled."""


class SpanKind(StrEnum):
    OBSERVED = "observed"
    """Tokens that the engine was given: rendered prompt text."""
    SAMPLED = "sampled"
    """Tokens that the policy produced, each with its logprob."""


@dataclass(frozen=True, slots=True)
class Note:
    """A named, countable event on a call: what was dropped, converted, weakened or retried."""

    name: str
    """Stable snake_case word; the label of the counter in ``/metrics``."""
    detail: str = ""


DEFAULT_POLICY: Final = "policy"
"""Name of the policy that a call asks when it names no other. A proxy may serve further policies,
each with weights and versions of its own; all of them share one tokenizer and chat template."""

FROZEN: Final = "model_frozen"
"""Name of the note on a call that another model than the policy answered: it is never trained."""


def is_frozen(notes: Iterable[Note]) -> bool:
    return any([note.name == FROZEN for note in notes])


class VersionRun(msgspec.Struct, frozen=True, gc=False):
    """From token ``start`` (0-based, within the sampled ids) on, ``version`` was sampling."""

    start: int
    version: int


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """One run of one harness on one task."""

    id: str
    created_at: float
    """Seconds since the epoch, like every time in the store."""
    run_id: str | None = None
    task_suite: str | None = None
    task_split: str | None = None
    task_id: str | None = None
    """Its own within the suite and split."""
    group_id: str | None = None
    """Sessions of one group are compared with each other by the trainer."""
    harness: str | None = None
    name: str | None = None
    """What a person calls it; the path segment of ``/s/{name}/…`` when set by the client."""
    key_hash: str | None = None
    """SHA-256 hex of the session key; the key itself is never stored."""
    verifier_key_hash: str | None = None
    """SHA-256 hex of the key that scores the session; the key itself is never stored."""
    expires_at: float | None = None
    continuation: Continuation = Continuation.EXACT
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Sampling pins and caps, budgets."""
    labels: Mapping[str, Any] = field(default_factory=dict)
    sealed_at: float | None = None
    outcome: str | None = None
    """How the rollout ended: ``completed``, ``timeout``, ``error`` …; ``None`` while open."""

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
    """The engine's own id of a call that it sampled; ``id`` is the one that the client was sent."""
    extra: Mapping[str, Any] | None = None
    """Opaque fields that an upstream sent with the call and may demand back (``extra_content``).
    The first call of a message has the message's own under :data:`MESSAGE_FIELDS`."""

    @property
    def own_extra(self) -> dict[str, Any]:
        """:attr:`extra` without the message's fields."""
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
    ids, encrypted reasoning, thinking signatures. Tool-call ids are not repeated here. They serve
    lineage while the request is admitted and are not stored."""

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


class RequestDigests(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A request in digests of 16 bytes: lineage compares requests by them."""

    system: bytes
    """The leading system messages."""
    system_form: bytes
    """How these are written."""
    tools: bytes
    ask: bytes
    """What else makes two requests the same question: tool choice, response format, prefill."""
    units: tuple[bytes, ...]
    """The steps after the base's reply (all steps when there is no base)."""
    forms: tuple[bytes, ...]
    """How these steps are written, one each."""
    depth: int
    """How many steps the whole request has, those before the base's reply included."""
    agent: str | None = None
    """The harness' own name of the (sub-)agent, when its headers give one."""
    arguments: str | None = None
    """What the chat template was given beside messages and tools, as JSON; ``None``: nothing."""
    prefill: str = ""
    """The beginning of the reply, which the request has as its last message. It is no step of the
    request: a later one repeats it and the reply as one message."""


class LineageState(msgspec.Struct, frozen=True, gc=False):
    """Which recorded reply a request continues, as lineage found when it was admitted."""

    digests: RequestDigests
    base_call_id: str | None = None
    """The deepest call whose whole conversation stands unchanged at the request's start."""
    base_choice: int = 0
    """Which of that call's replies is continued."""
    differs: tuple[str, ...] = ()
    """What the harness wrote differently along this conversation, so far."""
    confidence: float = 1.0
    """1.0 when an echoed id names the parent; less the more is inferred."""
    retry_of: str | None = None
    """An earlier call that asked the same. A retry is only what the request looked like when it
    was admitted: when the earlier call has children, both were samples."""


class Conversation(msgspec.Struct, frozen=True, gc=False):
    """The messages and tools of a request.

    The whole conversation is that of its base, then the base's reply, then ``tail``.
    """

    tail: tuple[Message, ...]
    """The messages after the base's reply; all of them when there is no base."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The definitions of the tools that the model had."""
    length: int = 0
    """Messages of the whole request, those before ``tail`` included."""
    instructions: bool = False
    """Whether the first message is a Responses request's ``instructions``."""
    lineage: LineageState | None = None


LogprobsOf = Literal["processed", "raw", "unknown"]
"""``processed``: of what was drawn from, after temperature, truncation and the rest. ``raw``: of
the policy before all that."""


class Sampler(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The distribution that the sampled tokens of a call were drawn from.

    The defaults are the policy's own distribution. ``None``: the request left the value to the
    engine, and nobody knows what the engine takes then.
    """

    logprobs: LogprobsOf = "unknown"
    """Which distribution the recorded logprobs are of."""
    temperature: float | None = 1.0
    """Below 1e-5: the likeliest token, always."""
    top_p: float | None = 1.0
    top_k: int | None = 0
    """0: all tokens."""
    min_p: float | None = 0.0
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    repetition_penalty: float | None = 1.0
    grammar: str = ""
    """The parts of the request that had a grammar shape the reply; empty: none."""
    others: tuple[str, ...] = ()
    """Further parameters of the request that change the distribution, such as ``logit_bias``."""

    @property
    def label(self) -> str:
        """These settings in a few words: ``temperature 0.7, top_p 0.8``."""
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
"""The parameters of a request that a sampler is made of."""
PLAIN: Final = Sampler()
"""The policy's own distribution."""


class CallBegun(msgspec.Struct, frozen=True, gc=False):
    """What is known when a request has been admitted; written before the engine is asked."""

    id: str
    session_id: str
    dialect: str
    started_at: float
    request_body: bytes
    """The client's bytes as they came."""
    stream: bool
    model_requested: str
    parent_call_id: str | None = None
    lineage_rule: str | None = None
    """Which rule found the parent: ``minted_id``, ``content``, ``token_prefix`` …"""
    headers: Mapping[str, str] = {}
    """Identity headers of the harness only; never credentials."""
    conversation: Conversation | None = None
    """``None`` for a request that has no messages which were read."""


class Choice(msgspec.Struct, frozen=True, gc=False):
    """One sampled sequence of a call (``n`` of them when the client asked for ``n``)."""

    token_ids: TokenIds
    """``uint32[T]``, the engine's own, stop token included."""
    logprobs: Logprobs
    """``float32[T]``, of the distribution that :attr:`Sampler.logprobs` names."""
    versions: tuple[VersionRun, ...]
    finish_reason: str | None


class Span(msgspec.Struct, frozen=True, gc=False):
    """An edge of a session's token tree; append-only, never changed after its commit.

    A span hangs at absolute token position ``start`` of its parent's path. The parent may reach
    further than ``start``: then this span branches off inside it.
    """

    id: str
    """``{call_id}.o`` for observed tokens, ``{call_id}.s{choice}`` for sampled ones."""
    session_id: str
    call_id: str
    parent_id: str | None
    start: int
    kind: SpanKind
    token_ids: TokenIds
    logprobs: Logprobs | None = None
    """``float32[len(token_ids)]`` for sampled spans, else ``None``."""
    versions: tuple[VersionRun, ...] = ()

    @property
    def end(self) -> int:
        """Absolute position after the last token."""
        return self.start + len(self.token_ids)


class Growth(msgspec.Struct, frozen=True, gc=False):
    """What a call adds to its session's token tree."""

    prompt_span_id: str | None
    """The span in which the prompt ends; ``None`` for an empty or unknown prompt."""
    spans: tuple[Span, ...]
    shared: int = 0
    """How many leading tokens of the prompt are those of the path that the call continues."""


class CallEnded(msgspec.Struct, frozen=True, gc=False):
    """What is known when a call is over; committing it is what makes the reply deliverable."""

    id: str
    session_id: str
    status: CallStatus
    ended_at: float
    first_token_at: float | None = None
    prompt_token_ids: TokenIds | None = None
    """``uint32[P]`` as the engine reports it used them; ``None`` without a report."""
    choices: tuple[Choice, ...] = ()
    growth: Growth | None = None
    """Where these tokens stand in the session's tree; ``None``: they are stored whole."""
    response_body: bytes = b""
    """What the client was sent, as bytes (the whole event stream when streaming)."""
    model_served: str | None = None
    usage: Mapping[str, Any] = {}
    sampling: Mapping[str, Any] = {}
    """Effective sampling parameters, as sent to the engine."""
    sampler: Sampler | None = None
    """What the tokens were drawn from; ``None``: not recorded."""
    replies: tuple[Message, ...] = ()
    """The reply of each choice, its tool calls under their minted ids."""
    kind: CallKind = CallKind.UNKNOWN
    role: str | None = None
    """Name of the sub-agent or side task, when the harness names it."""
    break_reason: BreakReason | None = None
    reason: str | None = None
    """Why a call failed, was cut or quarantined."""
    error: Mapping[str, Any] = {}
    notes: tuple[Note, ...] = ()
    compared: bool = False
    """Whether it has been looked for a contradiction (``integrity.py``); else the writer
    looks."""
    policy: str | None = None
    """The name of the policy that was asked, where it is another than the default."""


def span_id(call_id: str, choice: int) -> str:
    """``{call_id}.o`` or ``{call_id}.s{choice}``."""
    return f"{call_id}.o" if choice == OBSERVED else f"{call_id}.s{choice}"


def span_place(identifier: str) -> tuple[str, int]:
    """The call and the choice of a :func:`span_id`."""
    call_id, _, part = identifier.rpartition(".")
    return call_id, OBSERVED if part == "o" else int(part[1:])


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One job of ours that made sessions or weights: a proxy, a rollout, a training run."""

    id: str
    kind: str
    """``proxy``, ``rollout``, ``train``, ``sft``, ``eval``, ``demo`` …"""
    started_at: float
    name: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    ended_at: float | None = None
    status: str = "running"
    """``running``, then how it ended: ``completed``, ``failed``, ``stopped`` (by Ctrl-C or a
    signal). Set by its latest attempt, as are ``ended_at`` and ``reason``."""
    reason: str | None = None
    """One line: why it failed or was stopped."""


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One start of a run."""

    run_id: str
    number: int
    """From 1."""
    started_at: float
    writer_id: str | None = None
    """Of the process that runs it, in the table of writers."""
    ended_at: float | None = None
    status: str = "running"
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class AttemptBegun:
    """A run starts, for the first time or again."""

    run: RunRecord
    """Added unless the store knows its id."""
    at: float


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """A run ends."""

    run_id: str
    status: str
    """``completed``, ``failed`` or ``stopped``."""
    at: float
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class SessionFates:
    """Where a session's sampled tokens went in a training run. A later account of the same session
    by the same run replaces the earlier one."""

    session_id: str
    run_id: str
    tokens: Mapping[tuple[str, str], int]
    """By fate (``trained``, ``masked``, ``dropped``) and reason."""
    step: int
    """The step that took it, from 0."""
    version: int | None
    """Policy version after the step; ``None`` where weights have no number."""
    at: float


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """What a session is asked to do."""

    id: str
    """Its own within the suite and split."""
    suite: str
    split: str
    """``train``, ``eval`` …: tasks of one split are never used as another."""
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
    """Whether the engine's logprobs were compared with the trainer's after the publish."""
    logprob_gap: float | None = None
    """Mean absolute difference found by that comparison, in nats."""
    name: str = DEFAULT_POLICY
    """Which of the run's policies; each counts its versions by itself."""


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """What an engine last was reported to serve; one row each."""

    engine: str
    """Its base URL, as the proxy is given it."""
    version: int
    model: str | None
    """Served model name, when it changes with the version."""
    reported_at: float
    weights_fingerprint: str | None = None
    """The engine's own fingerprint of its weights at that time; ``None`` when it reports none."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of a training run."""

    run_id: str
    step: int
    name: str
    value: float
    at: float
