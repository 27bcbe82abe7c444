"""Request and response bodies of the control API. Their docstrings appear in its OpenAPI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from bridle.proxy.engines.circuit import CircuitState
from bridle.proxy.engines.pool import EngineState
from bridle.store.reading.call_rows import CallRow
from bridle.store.records import (
    SHORT_TEXT,
    CallKind,
    CallStatus,
    FindingMode,
    RewardKind,
    RewardSource,
    RunRecord,
    SessionRecord,
)

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,255}$")]
ShortText = Annotated[str, Field(min_length=1, max_length=SHORT_TEXT)]


class _Documented(BaseModel):
    """A model whose field docstrings become the fields' descriptions in the OpenAPI."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class _Body(_Documented):
    model_config = ConfigDict(extra="forbid")


class Task(_Body):
    """The session's task; it replaces a stored task of the same suite, split and id."""

    id: ShortText
    suite: ShortText
    split: Annotated[str, Field(min_length=1, max_length=32)]
    payload: dict[str, Any] = {}


class NewSession(_Body):
    name: Name | None = None
    run_id: str | None = None
    task: Task | None = None
    group_id: ShortText | None = None
    harness: ShortText | None = None
    continuation: Literal["exact", "rendered"] | None = None
    settings: dict[str, Any] = {}
    """``{"pin": {…}, "cap": {…}, "default": {…}}`` of sampling parameters, and ``{"budget":
    {"calls": …, "tokens": …, "wall_s": …}}``."""
    labels: dict[str, Any] = {}
    ttl_s: Annotated[float, Field(gt=0)] | None = None


class OpenedSession(_Documented):
    id: str
    key: str
    """The key that records calls of the session."""
    verifier_key: str
    """The key that rewards and seals the session, and sets kinds of its calls."""
    base_urls: dict[str, str]
    environment: dict[str, str]
    """Variables to set before the harness is started."""


class VerifierKey(_Documented):
    verifier_key: str
    """The key that rewards and seals the session, and sets kinds of its calls."""


class PrivateFiles(_Documented):
    paths: list[str]
    """Absolute paths on the machine that the proxy runs on."""


class SessionState(_Documented):
    id: str
    name: str | None
    run_id: str | None
    task_suite: str | None
    task_split: str | None
    task_id: str | None
    group_id: str | None
    harness: str | None
    continuation: str
    labels: dict[str, Any]
    created_at: float
    expires_at: float | None
    sealed_at: float | None
    outcome: str | None
    calls: dict[str, int]
    """Number of calls by status."""


class SessionDetail(SessionState):
    fault: str | None
    """A possible cause of the agent's failure that is not the agent's doing: the reason why its
    latest call got no complete reply, or ``proxy_restarted``. Null if there is none."""


class SampledAction(_Documented):
    turn: int
    """Number of the call in the session, as in ``bridle show``."""
    name: str
    arguments: Any
    """The arguments as the model wrote them."""


class RecordedCall(_Documented):
    """A model request and its reply."""

    id: str
    turn: int
    """Number of the call in the session, from 1."""
    continues: int | None
    """The turn of the call that this one continues."""
    dialect: str
    kind: CallKind
    status: CallStatus
    reason: str | None
    """The reason why the call failed or was put aside."""
    model: str
    started_at: float
    first_token_at: float | None
    ended_at: float | None
    prompt_tokens: int | None
    sampled_tokens: int | None
    policy_versions: tuple[int | None, int | None]
    finish_reason: str | None
    break_reasons: tuple[str, ...]
    notes: list[str]
    messages: list[dict[str, Any]]
    """The messages that the request added to the call that it continues, in chat form."""
    replies: list[dict[str, Any]]
    """The reply of each choice as a chat message."""


class NewReward(_Body):
    name: ShortText
    value: FiniteFloat
    call_id: str | None = None
    """Id of the call, if the reward is for one call alone. The call must already be recorded in the
    session."""
    turn: int | None = None
    """Number of the turn, if the reward is for one turn alone. Turns are the session's calls in the
    order of their start, counted from 1, as in ``bridle show``. The turn must have begun; its
    ``call_id`` is stored too."""
    kind: RewardKind = RewardKind.SCORE
    """``score`` is a number that counts. ``finding`` is a report about the session, which is never
    summed; its ``value`` is the number of times that it was seen."""
    mode: FindingMode | None = None
    """The effect of a finding: ``warn`` (the default) only shows it, ``zero`` lets no number of the
    session be above 0, ``quarantine`` keeps the session out of training. A score has none."""
    detail: dict[str, Any] = {}

    @model_validator(mode="after")
    def _mode_of_findings(self) -> Self:
        if self.kind is RewardKind.FINDING:
            self.mode = self.mode or FindingMode.WARN
        elif self.mode is not None:
            raise ValueError("a score has no mode: post it with kind `finding`, or without mode")
        return self


class RecordedReward(NewReward):
    session_id: str
    source: RewardSource
    """``verifier`` if the reward was given with a verifier key, ``operator`` if with the admin
    key."""


class NewKind(_Body):
    kind: CallKind
    role: ShortText | None = None
    by: ShortText = "control API"
    """The person or program that decided."""


class SetKind(_Documented):
    call_id: str
    kind: CallKind | None
    role: str | None
    by: str | None


class Seal(_Body):
    outcome: Annotated[str, Field(min_length=1, max_length=32)] = "completed"
    seconds: Annotated[dict[str, Annotated[float, Field(ge=0)]] | None, Field(max_length=16)] = None
    """Seconds that each stage of the session took, by its name. They are stored as the session's
    label ``seconds``."""


class EngineView(_Documented):
    name: str
    url: str
    circuit: CircuitState
    policy_version: int
    """The engine's policy version that was published last."""
    changed: bool
    """Whether the engine reports other weights than were published."""
    usable: bool
    """Whether the circuit admits calls and the engine serves the pool's policy version."""
    running: int
    retries: int
    ejections: int
    changes: int
    """Number of times that the engine was found with other weights."""
    rendering_difference: str
    """The difference between a prompt of the engine and the proxy's own rendering of the same
    messages; empty if there is none. While it is not empty, the engine's calls are not continued
    exactly."""


class PutRun(_Body):
    kind: Annotated[str, Field(min_length=1, max_length=32)]
    """The kind of the run, such as ``rollout``, ``train`` or ``eval``. A run keeps the kind that it
    began with."""
    name: Annotated[str, Field(pattern=r"^[^\x00-\x1f]{1,256}$")] | None = None
    status: Literal["running", "completed", "failed", "stopped"] = "running"
    reason: Annotated[str, Field(max_length=512)] | None = None
    """The reason why the run failed or was stopped, in one line."""


class RunState(_Documented):
    id: str
    kind: str
    name: str | None
    started_at: float
    ended_at: float | None
    status: str
    reason: str | None


class NewEngine(_Body):
    url: Annotated[str, Field(pattern=r"^https?://[^/?#@\s]+(/[^?#\s]*)?$", max_length=512)]
    policy_version: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """The version that the engine serves. It gets calls only while that is the pool's version."""


class PolicyState(_Documented):
    version: int
    """The default policy's version; ``model`` is its model."""
    model: str | None
    paused: bool
    running: int
    """Number of running calls over all policies; ``waiting`` likewise."""
    waiting: int
    policies: dict[str, int]
    """The versions of the further policies, by name."""


class PublishPolicy(_Body):
    policy: str | None = None
    """The policy's name, if the proxy serves several; by default the default policy."""
    version: Annotated[int, Field(ge=0, lt=2**63)]
    model: str | None = None
    """The served model's name, if it changes with the version."""
    back: bool = False
    """Whether a lower version is permitted, for a publish that was undone or an engine that was
    restarted."""
    engine: str | None = None
    """Name or URL of the one engine that serves the version. By default, all engines of the policy
    serve it."""


class Pause(_Body):
    mode: Literal["drain", "span"] = "drain"
    """``drain`` waits until running calls end, ``span`` lets them continue across the update."""
    timeout_s: Annotated[float, Field(ge=0, le=3600)] = 600.0


class ErrorDetail(_Documented):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(_Documented):
    error: ErrorDetail


def engine_view(state: EngineState) -> EngineView:
    return EngineView(**msgspec.structs.asdict(state))


def run_state(run: RunRecord) -> RunState:
    return RunState(
        id=run.id,
        kind=run.kind,
        name=run.name,
        started_at=run.started_at,
        ended_at=run.ended_at,
        status=run.status,
        reason=run.reason,
    )


def session_detail(
    session: SessionRecord, calls: Mapping[CallStatus, int], fault: str | None
) -> SessionDetail:
    return SessionDetail(**dict(session_state(session, calls)), fault=fault)


def session_state(session: SessionRecord, calls: Mapping[CallStatus, int]) -> SessionState:
    return SessionState(
        id=session.id,
        name=session.name,
        run_id=session.run_id,
        task_suite=session.task_suite,
        task_split=session.task_split,
        task_id=session.task_id,
        group_id=session.group_id,
        harness=session.harness,
        continuation=session.continuation.value,
        labels=dict(session.labels),
        created_at=session.created_at,
        expires_at=session.expires_at,
        sealed_at=session.sealed_at,
        outcome=session.outcome,
        calls={status.value: count for status, count in calls.items()},
    )


def recorded_call(call: CallRow, turns: Mapping[str, int]) -> RecordedCall:
    """Return ``call`` as the API shows it. ``turns`` has the number of each call of the session, by
    its id."""
    asked = () if call.conversation is None else call.conversation.tail
    return RecordedCall(
        id=call.id,
        turn=turns[call.id],
        continues=turns.get(call.parent_call_id or ""),
        dialect=call.dialect,
        kind=call.kind,
        status=call.status,
        reason=call.reason,
        model=call.model_served or call.model_requested,
        started_at=call.started_at,
        first_token_at=call.first_token_at,
        ended_at=call.ended_at,
        prompt_tokens=call.prompt_tokens,
        sampled_tokens=call.sampled_tokens,
        policy_versions=(call.version_start, call.version_end),
        finish_reason=call.finish_reason,
        break_reasons=call.break_reasons,
        notes=[note.name for note in call.notes],
        messages=[message.to_chat() for message in asked],
        replies=[message.to_chat() for message in call.replies],
    )
