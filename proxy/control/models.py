"""Request and response bodies of the control API. Their docstrings appear in its OpenAPI."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import msgspec
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationInfo,
    create_model,
    field_validator,
)
from pydantic_core import PydanticCustomError

from bridle.proxy.engines.circuit import CircuitState
from bridle.proxy.engines.pool import EnginePool, EngineState
from bridle.store.call import CallRow
from bridle.store.declaration import SHORT_TEXT, stored
from bridle.store.records import CallKind, CallStatus, RunRecord, SessionRecord, StartFacts
from bridle.store.reward import Reward

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,255}$")]
ShortText = Annotated[str, Field(min_length=1, max_length=SHORT_TEXT)]


class _Documented(BaseModel):
    """A model whose field docstrings become the fields' descriptions in the OpenAPI."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class _Body(_Documented):
    model_config = ConfigDict(extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_boolean(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse a boolean where a number belongs, for which pydantic takes it."""
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and {int, float} & {kind, *get_args(kind)}:
            raise PydanticCustomError("number", "a number is needed, not a boolean")
        return value


def _declared(base: type[BaseModel], owner: type, without: Collection[str] = ()) -> Any:
    """Return a model of the shown facts of a record (``store/declaration.py``).

    A model of a request has their limits and defaults.
    """
    fields: dict[str, Any] = {}
    for one in stored(owner):
        if not one.fact.shown or one.name in without:
            continue
        limits: dict[str, Any] = {"description": f"{one.fact.meaning}."}
        kind: Any = one.kind
        if one.is_json:
            item = get_args(kind)[0] if get_origin(kind) is tuple else None
            kind = dict[str, Any] if item is None else list[str] if item is str else list[Any]
        if issubclass(base, _Body):
            if kind is str and one.fact.size is not None:
                limits |= {"min_length": 1, "max_length": one.fact.size}
            if kind is float:
                kind = FiniteFloat
            if not one.required:
                limits["default"] = one.default
        if one.nullable and one.default is None:
            kind |= None
        fields[one.name] = (kind, Field(**limits))
    return create_model(owner.__name__, __base__=base, **fields)


def _shown(record: Any) -> dict[str, Any]:
    """Return the shown facts of a record as JSON."""
    owner: type = type(record)
    return {
        one.name: msgspec.to_builtins(getattr(record, one.name))
        for one in stored(owner)
        if one.fact.shown
    }


class Task(_Body):
    """The session's task; it replaces a stored task of the same suite, split and id."""

    id: ShortText
    suite: ShortText
    split: Annotated[str, Field(min_length=1, max_length=32)]
    payload: dict[str, Any] = {}


class SessionStart(_declared(_Body, StartFacts)):  # type: ignore[misc]
    """The start of the session's harness."""


class Origin(_Body):
    """The recorded session that a new one re-enters."""

    session: Annotated[str, Field(min_length=1, max_length=64)]
    """Its id."""
    call: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """The id of the recorded call at which the new session goes on live; by default it does so
    after the last one."""


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
    start: SessionStart | None = None
    """The start of the session's harness, if it is known already."""
    origin: Origin | None = None
    """The session to re-enter. ``settings.replay`` has the rules: ``{"on_divergence": "stop",
    "noise": {NAME: REGEX}, "model": NAME}``."""


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


class SessionState(_declared(_Documented, SessionRecord)):  # type: ignore[misc]
    """A session."""

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


class RecordedCall(_declared(_Documented, CallRow)):  # type: ignore[misc]
    """A model request and its reply."""

    turn: int
    """Number of the call in the session, from 1."""
    continues: int | None
    """The turn of the call that this one continues."""
    model: str
    """The model that was served, or else the one that was requested."""
    messages: list[dict[str, Any]]
    """The messages that the request added to the call that it continues, in chat form."""
    replies: list[dict[str, Any]]
    """The reply of each choice as a chat message."""


_GIVEN: Final = {"session_id", "source", "created_at"}
"""The fields of a reward that the server sets."""


class NewReward(_declared(_Body, Reward, without=_GIVEN)):  # type: ignore[misc]
    """A reward of the session, or of one role, branch, call or turn of it.

    Turns are the session's calls in the order of their start, as in ``bridle show``. A call, a turn
    and the end of a branch must have begun; the ``call_id`` of a turn is stored too.
    """

    scorer: bool = False
    """True if a scorer beside the run's verifier gave the reward; only the session's verifier key
    gives such a reward."""


class RecordedReward(_declared(_Documented, Reward)):  # type: ignore[misc]
    """A reward as recorded."""


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
    start: SessionStart | None = None
    """The start of the session's harness, if it was not known when the session was created."""


class EngineView(_Documented):
    name: str
    url: str
    circuit: CircuitState
    policy_version: int
    """The engine's policy version that was published last."""
    changed: bool
    """True if the engine reports other weights than were published."""
    usable: bool
    """True if the circuit admits calls and the engine serves the pool's policy version."""
    running: int
    retries: int
    ejections: int
    changes: int
    """Number of times that the engine was found with other weights."""
    rendering_difference: str
    """The difference between a prompt of the engine and the proxy's own rendering of the same
    messages; empty if there is none. While it is not empty, the engine's calls are not continued
    exactly."""


class UpstreamView(_Documented):
    """Another provider's API, as the process that replies knows it."""

    model: str
    """The name or the pattern of the models that it serves."""
    urls: list[str]
    passes: list[str]
    """The dialects whose requests it gets as they are. All others are translated to chat."""
    limit: str | None
    """Its name of the largest number of tokens of a reply, as learned from a refusal; null while
    it gets the client's."""
    wants: list[str]
    """The opaque fields of assistant messages that it gets back, because it sent them or demanded
    them."""
    refuses: list[str]
    """The opaque fields that it objected to, and gets no more."""


def upstream_view(model: str, pool: EnginePool) -> UpstreamView:
    fields = pool.upstream_fields
    return UpstreamView(
        model=model,
        urls=sorted(pool.urls()),
        passes=sorted(pool.speaks),
        limit=fields.limit,
        wants=sorted(fields.taken),
        refuses=sorted(fields.refused),
    )


class PutRun(_Body):
    kind: Annotated[str, Field(min_length=1, max_length=32)]
    """The kind of the run, such as ``rollout``, ``train`` or ``eval``. A run keeps the kind that it
    began with."""
    name: Annotated[str, Field(pattern=r"^[^\x00-\x1f]{1,256}$")] | None = None
    status: Literal["running", "completed", "failed", "stopped"] = "running"
    reason: Annotated[str, Field(max_length=512)] | None = None
    """The reason why the run failed or was stopped, in one line."""
    config: dict[str, Any] = {}
    """The settings that the run begins with: ``tasks``, ``agent`` and others."""


class RunState(_Documented):
    id: str
    kind: str
    config: dict[str, Any]
    """The settings of the run, as it stated them."""
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
    """True if a lower version is permitted, for a publish that was undone or an engine that was
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
    return RunState(**asdict(run))


def start_facts(start: SessionStart | None) -> dict[str, Any]:
    """Return the facts of a start that are known."""
    given = {} if start is None else start.model_dump(exclude_none=True)
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
    }


def session_detail(
    session: SessionRecord, calls: Mapping[CallStatus, int], fault: str | None
) -> SessionDetail:
    return SessionDetail(**dict(session_state(session, calls)), fault=fault)


def session_state(session: SessionRecord, calls: Mapping[CallStatus, int]) -> SessionState:
    return SessionState(
        **_shown(session), calls={status.value: count for status, count in calls.items()}
    )


def recorded_reward(reward: Reward) -> RecordedReward:
    return RecordedReward(**_shown(reward))


def recorded_call(
    call: CallRow, turns: Mapping[str, int], judged: Mapping[str, str | None]
) -> RecordedCall:
    """Return ``call`` as the API shows it.

    ``turns`` has the number of each call of the session, by its id. ``judged`` has the facts that
    take precedence over the recorded ones.
    """
    asked = () if call.conversation is None else call.conversation.tail
    return RecordedCall(
        **{**_shown(call), **judged},
        turn=turns[call.id],
        continues=turns.get(call.parent_call_id or ""),
        model=call.model_served or call.model_requested,
        messages=[message.to_chat() for message in asked],
        replies=[message.to_chat() for message in call.replies],
    )
