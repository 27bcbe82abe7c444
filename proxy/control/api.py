"""The routes of the control API under ``/bridle/v1``, for rollouts and trainers."""

from __future__ import annotations

import asyncio
import pathlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, FastAPI, Path, Query, Request

from bridle.proxy import __doc__ as description
from bridle.proxy.control.access import (
    Admin,
    Authenticated,
    Running,
    ScoredSession,
    found_session,
)
from bridle.proxy.control.errors import add_error_handlers
from bridle.proxy.control.models import (
    EngineView,
    ErrorReply,
    NewEngine,
    NewKind,
    NewReward,
    NewSession,
    OpenedSession,
    Pause,
    PolicyState,
    PrivateFiles,
    PublishPolicy,
    PutRun,
    RecordedCall,
    RecordedReward,
    RunState,
    SampledAction,
    Seal,
    SessionDetail,
    SessionState,
    SetKind,
    UpstreamView,
    VerifierKey,
    engine_view,
    recorded_call,
    recorded_reward,
    run_state,
    session_detail,
    session_state,
    start_facts,
    upstream_view,
)
from bridle.proxy.engines.addresses import require_engine_address
from bridle.proxy.engines.pool import Policy
from bridle.proxy.services import Services
from bridle.proxy.session.keys import hash_key, new_session_key, new_verifier_key
from bridle.proxy.session.registry import (
    SESSION_ID_PREFIX,
    Caller,
    store_unavailable,
)
from bridle.proxy.session.rules import check_settings
from bridle.proxy.wire.canonical import ApiError
from bridle.store.errors import NotFound, RecordRejected, StoreUnavailable
from bridle.store.operations.gates import StaleVersion
from bridle.store.reading.queries import Reader
from bridle.store.records import (
    AGENTS_OWN,
    CLIENT_DISCONNECTED,
    DEFAULT_POLICY,
    CallStatus,
    Continuation,
    RunRecord,
    SessionRecord,
    TaskRecord,
    new_id,
)
from bridle.store.reward import Reward, RewardSource
from bridle.store.schema.database import database_url


def control_api(running: Callable[[], Services], routers: Sequence[APIRouter] = ()) -> FastAPI:
    """Return the FastAPI application; ``running`` returns the services or raises 503."""
    api = FastAPI(
        title="Bridle",
        description=description,
        version="1",
        docs_url=None,
        redoc_url=None,
        responses={"4XX": {"model": ErrorReply}, "5XX": {"model": ErrorReply}},
    )
    api.state.running = running
    add_error_handlers(api)
    for method, path, endpoint, status in _ROUTES:
        api.add_api_route(f"/bridle/v1{path}", endpoint, methods=[method], status_code=status)
    for router in routers:
        api.include_router(router)
    return api


async def create_session(
    new: NewSession, request: Request, services: Running, _: Admin
) -> OpenedSession:
    """Open a session.

    The reply is the only place where its keys appear. Give ``key`` to the harness, and
    ``verifier_key`` to the code that scores it, never to the harness.
    """
    settings = services.settings
    try:
        check_settings(new.settings)
    except ValueError as error:
        raise ApiError("invalid_request", str(error), status=422, param="settings") from error
    now = time.time()
    if new.task is not None:
        task = TaskRecord(**new.task.model_dump(), created_at=now)
        try:
            await asyncio.to_thread(services.writer.add_sync, task)
        except RecordRejected as error:
            message = f"the task cannot be stored: {error}"
            raise ApiError("invalid_request", message, status=422, param="task") from error
        except StoreUnavailable as error:
            raise store_unavailable() from error
    key, session_id = new_session_key(), new_id(SESSION_ID_PREFIX)
    verifier_key = new_verifier_key(session_id)
    record = SessionRecord(
        id=session_id,
        created_at=now,
        run_id=new.run_id,
        task_suite=new.task.suite if new.task else None,
        task_split=new.task.split if new.task else None,
        task_id=new.task.id if new.task else None,
        group_id=new.group_id,
        harness=new.harness,
        name=new.name,
        key_hash=hash_key(key),
        verifier_key_hash=hash_key(verifier_key),
        expires_at=None if new.ttl_s is None else now + new.ttl_s,
        continuation=Continuation(new.continuation or settings.continuation),
        settings=new.settings,
        labels=new.labels,
        origin_session_id=None if new.origin is None else new.origin.session,
        origin_call_id=None if new.origin is None else new.origin.call,
        **start_facts(new.start),
    )
    if new.origin is not None:
        await services.replays.check(record)
    await services.sessions.create(record)
    base = settings.public_url or f"{request.url.scheme}://{request.url.netloc}"
    root = f"{base.rstrip('/')}/s/{record.id}"
    environments = [one.environment(root, key).items() for one in services.providers]
    return OpenedSession(
        id=record.id,
        key=key,
        verifier_key=verifier_key,
        base_urls={one.name: one.base_url(root) for one in services.providers},
        environment=dict(chain.from_iterable(environments)),
    )


async def renew_verifier_key(session_id: str, services: Running, _: Admin) -> VerifierKey:
    """Make a new verifier key for the session.

    It is for a worker that continues without the key that it was given. The key before it becomes
    invalid. The reply is the only place where the new key appears.
    """
    session = await found_session(session_id, services)
    return VerifierKey(verifier_key=await services.sessions.renew_verifier_key(session.id))


async def private_files(services: Running, _: Admin) -> PrivateFiles:
    """List the files of the proxy's machine that no session may see: its store and its keys."""
    files = list(services.settings.private_files)
    store = database_url(services.settings.store_url)
    if store.drivername.startswith("sqlite") and store.database:
        files.append(pathlib.Path(store.database))
    return PrivateFiles(paths=[str(path.absolute()) for path in files])


async def list_sessions(
    services: Running,
    _: Admin,
    run_id: str | None = None,
    group_id: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> list[SessionState]:
    """List the sessions, the latest first."""

    def read() -> list[SessionState]:
        reader = services.reader
        found = list(reader.sessions(run=run_id, group=group_id, limit=limit, newest_first=True))
        counts = reader.call_counts_of([session.id for session in found])
        return [session_state(session, counts[session.id]) for session in found]

    return await asyncio.to_thread(read)


async def get_session(session: ScoredSession, services: Running) -> SessionDetail:
    """Return one session, with the number of its calls by status."""

    def read() -> SessionDetail:
        counts = services.reader.call_counts(session.id)
        return session_detail(session, counts, _fault(session, services))

    return await asyncio.to_thread(read)


def _fault(session: SessionRecord, services: Services) -> str | None:
    """Return the value of :attr:`SessionDetail.fault`.

    A client that left while tokens came did so on its own; one that left before the first may have
    waited for too long.
    """
    if session.sealed_at is None and session.created_at < services.started_at:
        return "proxy_restarted"
    status, reason = services.reader.latest_call(session.id) or (None, None)
    left = status is CallStatus.PARTIAL and reason == CLIENT_DISCONNECTED
    return None if left or reason in AGENTS_OWN else reason


async def get_calls(
    session: ScoredSession,
    services: Running,
    first: Annotated[int, Query(ge=1)] = 1,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> list[RecordedCall]:
    """List the session's calls from turn ``first`` on, each with the messages that it added."""

    def read() -> list[RecordedCall]:
        calls = services.reader.calls(session.id)
        judged = services.reader.judged(session.id)
        turns = {call.id: turn for turn, call in enumerate(calls, start=1)}
        return [
            recorded_call(call, turns, judged[call.id])
            for call in calls[first - 1 : first - 1 + limit]
        ]

    return await asyncio.to_thread(read)


async def get_actions(session: ScoredSession, services: Running) -> list[SampledAction]:
    """List the tool calls that the model sampled in the session, in the order of its calls."""
    calls = await asyncio.to_thread(services.reader.calls, session.id)
    return [
        SampledAction(turn=turn, name=tool.name, arguments=tool.arguments)
        for turn, call in enumerate(calls, start=1)
        for reply in call.replies
        for tool in reply.tool_calls
    ]


async def list_rewards(session: ScoredSession, services: Running) -> list[RecordedReward]:
    """List the rewards and findings of the session, the oldest first."""
    found = await asyncio.to_thread(services.reader.rewards, session.id)
    return [recorded_reward(one) for one in found]


async def add_reward(
    new: NewReward, session: ScoredSession, services: Running, caller: Authenticated
) -> RecordedReward:
    """Record a reward for the session, or for a role, branch, call or turn of it.

    A sealed session may still get rewards. The key of the request determines the reward's source.
    """
    new = await asyncio.to_thread(_placed, services.reader, session.id, new)
    facts = new.model_dump(exclude={"scorer"})
    source = _source(new, caller)
    try:
        reward = Reward(session_id=session.id, created_at=time.time(), source=source, **facts)
        await services.writer.add(reward)
    except (ValueError, RecordRejected) as error:
        raise ApiError("invalid_request", str(error), status=422) from error
    except StoreUnavailable as error:
        raise store_unavailable() from error
    return recorded_reward(reward)


def _source(new: NewReward, caller: Caller) -> RewardSource:
    """Return the reward's source. Raise 422 for a scorer's reward with the admin key."""
    if new.scorer and caller.admin:
        message = "a scorer's reward is given with the session's verifier key, not the admin key"
        raise ApiError("invalid_request", message, status=422, param="scorer")
    given = RewardSource.SCORER if new.scorer else RewardSource.VERIFIER
    return RewardSource.OPERATOR if caller.admin else given


def _placed(reader: Reader, session_id: str, new: NewReward) -> NewReward:
    """Return the reward with its call.

    Raise 404 for a call or branch that is not in the session, and 422 when ``call_id`` and ``turn``
    name different calls.
    """
    if new.call_id is None and new.turn is None and new.branch is None:
        return new
    recorded = reader.call_ids(session_id)
    for name in ("call_id", "branch"):
        if getattr(new, name) is not None and getattr(new, name) not in recorded:
            message = f"session {session_id} has no call {getattr(new, name)}"
            raise ApiError("not_found", message, status=404, param=name)
    if new.turn is None:
        return new
    if not 1 <= new.turn <= len(recorded):
        has = f"turns 1 to {len(recorded)}, not {new.turn}" if recorded else "no turn yet"
        raise ApiError("not_found", f"session {session_id} has {has}", status=404, param="turn")
    call_id = recorded[new.turn - 1]
    if new.call_id not in (None, call_id):
        message = f"turn {new.turn} is call {call_id}, not {new.call_id}: name one of them"
        raise ApiError("invalid_request", message, status=422, param="turn")
    placed: NewReward = new.model_copy(update={"call_id": call_id})
    return placed


async def set_kind(
    call_id: str, new: NewKind, session: ScoredSession, services: Running
) -> SetKind:
    """Set the kind of a call. It takes precedence over the kind that was recorded or derived."""
    await _set_kind(call_id, new, session, services)
    return SetKind(call_id=call_id, kind=new.kind, role=new.role, by=new.by)


async def unset_kind(call_id: str, session: ScoredSession, services: Running) -> SetKind:
    """Remove a kind that was set: the recorded kind is valid again."""
    await _set_kind(call_id, None, session, services)
    return SetKind(call_id=call_id, kind=None, role=None, by=None)


async def _set_kind(
    call_id: str, new: NewKind | None, session: SessionRecord, services: Services
) -> None:
    kind, role, by = (None, None, "") if new is None else (new.kind, new.role, new.by)
    try:
        call = await asyncio.to_thread(services.reader.call, call_id)
    except NotFound:
        call = None
    if call is None or call.session_id != session.id:
        raise ApiError("not_found", f"session {session.id} has no call {call_id}", status=404)
    try:
        await services.writer.set_kind(call_id, kind, role, by=by)
    except StoreUnavailable as error:
        raise store_unavailable() from error


async def seal_session(
    session: ScoredSession, services: Running, seal: Seal | None = None
) -> SessionState:
    """End the session: no further call is admitted. A second seal keeps the first outcome."""
    if session.sealed_at is None:
        seal = seal or Seal()
        fields = start_facts(seal.start)
        if seal.seconds:
            fields["labels"] = {**session.labels, "seconds": seal.seconds}
        await services.sessions.seal(session.id, seal.outcome, fields)
        session = await found_session(session.id, services)
    return await get_session(session, services)


RunId = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]*$", max_length=64)]


async def put_run(run_id: RunId, new: PutRun, services: Running, _: Admin) -> RunState:
    """Begin a run, which sessions then name as their ``run_id``.

    If the run has begun, set how it ended.
    """

    def put() -> RunRecord:
        now = time.time()
        try:
            run = services.reader.run(run_id)
        except NotFound:
            run = RunRecord(run_id, new.kind, now, name=new.name, config=new.config)
            services.writer.add_sync(run)
        if new.status in ("running", run.status):
            return run
        services.writer.finish_run(run_id, new.status, now, new.reason)
        return replace(run, status=new.status, ended_at=now, reason=new.reason)

    return run_state(await asyncio.to_thread(put))


async def get_run(run_id: RunId, services: Running, _: Admin) -> RunState:
    """Return a run and its settings."""
    return run_state(await asyncio.to_thread(services.reader.run, run_id))


async def get_policy(services: Running, _: Admin) -> PolicyState:
    """Return the published version of each policy, and the calls of all proxy processes.

    The calls are the running and the waiting ones.
    """
    return PolicyState(**msgspec.structs.asdict(await services.deployment.state()))


async def put_policy(new: PublishPolicy, services: Running, caller: Admin) -> PolicyState:
    """Publish a policy version.

    From now on, tokens of all engines of the policy, or of the named one, are stamped with it.
    Engines of another version than the newest get no new calls.
    """
    name, pools = new.policy or DEFAULT_POLICY, services.models.policies
    if name not in pools:
        message = f"there is no policy {name}; there are: {', '.join(pools)}"
        raise ApiError("not_found", message, status=404, param="policy")
    policy = Policy(new.version, new.model)
    try:
        await services.deployment.publish(policy, new.engine, back=new.back, name=name)
    except StaleVersion as error:
        raise ApiError("invalid_request", str(error), status=409, param="version") from error
    except NotFound as error:
        raise ApiError("not_found", str(error), status=404, param="engine") from error
    return await get_policy(services, caller)


async def list_engines(services: Running, _: Admin) -> list[EngineView]:
    """List the engines of all policies as the process that replies knows them.

    Each process counts its own calls, and finds for itself whether an engine is healthy.
    """
    await services.deployment.learn()
    return [engine_view(state) for state in services.models.states()]


async def list_upstreams(services: Running, _: Admin) -> list[UpstreamView]:
    """List the APIs of other providers, with what their replies and refusals have shown.

    Each process learns for itself, from its own calls.
    """
    return [upstream_view(name, pool) for name, pool in services.models.external().items()]


async def add_engine(new: NewEngine, services: Running, _: Admin) -> list[EngineView]:
    """Add an engine for the default policy.

    A known engine stays as it is. The proxy's upstream key is not sent to it; an engine that needs
    that key must be named when the proxy is started.
    """
    try:
        await asyncio.to_thread(require_engine_address, new.url)
        await services.deployment.add_engine(new.url, new.policy_version)
    except ValueError as error:
        raise ApiError("invalid_request", str(error), status=422, param="url") from error
    return await list_engines(services, _)


async def remove_engine(name: str, services: Running, _: Admin) -> list[EngineView]:
    """Remove an engine of the default policy: it gets no further calls.

    The reply follows when its running calls have ended.
    """
    try:
        await services.deployment.remove_engine(name)
    except NotFound as error:
        raise ApiError("not_found", str(error), status=404, param="engine") from error
    except ValueError as error:
        raise ApiError("invalid_request", str(error), status=409) from error
    return await list_engines(services, _)


async def pause(new: Pause, services: Running, caller: Admin) -> PolicyState:
    """Hold new calls of all policies back.

    With ``drain`` the reply follows when no call runs, or after ``timeout_s``.
    """
    await services.deployment.pause(new.timeout_s if new.mode == "drain" else None)
    return await get_policy(services, caller)


async def resume(services: Running, caller: Admin) -> PolicyState:
    await services.deployment.resume()
    return await get_policy(services, caller)


_ROUTES: tuple[tuple[str, str, Callable[..., Any], int], ...] = (
    ("POST", "/sessions", create_session, 201),
    ("GET", "/sessions", list_sessions, 200),
    ("GET", "/sessions/{session_id}", get_session, 200),
    ("GET", "/sessions/{session_id}/calls", get_calls, 200),
    ("GET", "/sessions/{session_id}/actions", get_actions, 200),
    ("POST", "/sessions/{session_id}/rewards", add_reward, 201),
    ("GET", "/sessions/{session_id}/rewards", list_rewards, 200),
    ("POST", "/sessions/{session_id}/verifier-key", renew_verifier_key, 201),
    ("PUT", "/sessions/{session_id}/calls/{call_id}/kind", set_kind, 200),
    ("DELETE", "/sessions/{session_id}/calls/{call_id}/kind", unset_kind, 200),
    ("POST", "/sessions/{session_id}/seal", seal_session, 200),
    ("GET", "/private-files", private_files, 200),
    ("PUT", "/runs/{run_id}", put_run, 200),
    ("GET", "/runs/{run_id}", get_run, 200),
    ("GET", "/policy", get_policy, 200),
    ("PUT", "/policy", put_policy, 200),
    ("GET", "/engines", list_engines, 200),
    ("GET", "/upstreams", list_upstreams, 200),
    ("POST", "/engines", add_engine, 200),
    ("DELETE", "/engines/{name}", remove_engine, 200),
    ("POST", "/pause", pause, 200),
    ("POST", "/resume", resume, 200),
)
