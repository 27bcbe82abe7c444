"""Bodies of the control API, as its OpenAPI shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from bridle.proxy.engines.circuit import CircuitState
from bridle.proxy.engines.pool import EngineState
from bridle.store.records import SHORT_TEXT, CallKind, CallStatus, SessionRecord

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,255}$")]
ShortText = Annotated[str, Field(min_length=1, max_length=SHORT_TEXT)]


class _Told(BaseModel):
    """What is said of a field below it is in the OpenAPI."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class _Body(_Told):
    model_config = ConfigDict(extra="forbid")


class Task(_Body):
    """What the session is asked to do; renewed when its suite and split know the id already."""

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


class OpenedSession(_Told):
    id: str
    key: str
    base_urls: dict[str, str]
    environment: dict[str, str]
    """Set these and start the harness."""


class SessionState(_Told):
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
    """How many calls there are, by status."""


class NewReward(_Body):
    name: ShortText
    value: FiniteFloat
    call_id: str | None = None
    """Only this call; it must be recorded in the session by now."""
    turn: int | None = None
    """Only this turn: the session's calls in the order of their start, from 1 on, as ``bridle
    show`` numbers them. It must have begun by now; it is kept as its ``call_id`` too."""
    source: ShortText | None = None
    detail: dict[str, Any] = {}


class RecordedReward(NewReward):
    session_id: str


class NewKind(_Body):
    kind: CallKind
    role: ShortText | None = None
    by: ShortText = "control API"
    """Who says so."""


class SetKind(_Told):
    call_id: str
    kind: CallKind | None
    role: str | None
    by: str | None


class Seal(_Body):
    outcome: Annotated[str, Field(min_length=1, max_length=32)] = "completed"


class EngineView(_Told):
    name: str
    url: str
    circuit: CircuitState
    policy_version: int
    """As it was last told."""
    changed: bool
    """It says itself that it serves other weights than it did then."""
    usable: bool
    """Its circuit admits calls and it serves the pool's policy version."""
    running: int
    retries: int
    ejections: int
    changes: int
    """How often it was found to have changed."""


class NewEngine(_Body):
    url: Annotated[str, Field(pattern=r"^https?://[^/?#@\s]+(/[^?#\s]*)?$", max_length=512)]
    policy_version: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """What it serves; while that is not the pool's version it gets no calls."""


class PolicyState(_Told):
    version: int
    model: str | None
    paused: bool
    running: int
    waiting: int


class PublishPolicy(_Body):
    version: Annotated[int, Field(ge=0, lt=2**63)]
    model: str | None = None
    """Served model name, when it changes with the version."""
    back: bool = False
    """Earlier weights are meant: a publish was taken back, or the engine was started anew."""
    engine: str | None = None
    """Name or URL of the one engine that serves it; all of them when left out."""


class Pause(_Body):
    mode: Literal["drain", "span"] = "drain"
    """``drain`` waits for running calls, ``span`` lets them go on across the update."""
    timeout_s: Annotated[float, Field(ge=0, le=3600)] = 600.0


class ErrorDetail(_Told):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(_Told):
    error: ErrorDetail


def engine_view(state: EngineState) -> EngineView:
    return EngineView(**msgspec.structs.asdict(state))


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
