"""The trajectory feed on the control API: sealed sessions as samples, for other trainers.

``POST /bridle/v1/trajectories/{consumer}/lease`` answers with trajectories as NDJSON (a session per
line) or as an Arrow stream (a sample per row) and names the lease in ``x-bridle-lease``. It answers
204 if there are none. ``…/leases/{lease}/ack`` reports that they have been trained, and ``DELETE``
gives them up. Sessions come from the proxy's store and from its ``feed_stores``
(``feed_stores.py``). ``GET /bridle/v1/trajectories?cursor=`` pages through the sessions of the
proxy's own store and keeps no account.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
import orjson
from fastapi import APIRouter, Depends, Path, Query, Response

from bridle.proxy.control.access import Admin, Running
from bridle.proxy.services import Services
from bridle.proxy.wire.canonical import ApiError
from bridle.reconstruct.arrow import ArrowMissing, needs_arrow
from bridle.reconstruct.episodes import episode_of
from bridle.reconstruct.rewards import CountedRewards, findings_in, part_scores, session_rewards
from bridle.reconstruct.samples.builders import BUILDERS
from bridle.reconstruct.samples.rules import DEFAULT_RULES
from bridle.reconstruct.samples.sample import Episode, Sample
from bridle.reconstruct.samples.scores import with_scores
from bridle.reconstruct.session import LoadedSession
from bridle.reconstruct.tables import sample_row, sample_schema, sample_values
from bridle.reconstruct.tree import BrokenTree
from bridle.run.feed_stores import FeedStores
from bridle.store.operations.leases import SETTLE_S, Lease, Leases, UnknownLease
from bridle.store.reading.damage import DamagedRows
from bridle.store.reading.queries import Reader
from bridle.store.records import SessionRecord

NDJSON: Final = "application/x-ndjson"
ARROW: Final = "application/vnd.apache.arrow.stream"
LEASE_HEADER: Final = "x-bridle-lease"
CURSOR_HEADER: Final = "x-bridle-cursor"
BROKEN_HEADER: Final = "x-bridle-broken"
"""The header with the number of sessions that contradict themselves (``bridle audit``) and are left
out."""

Form = Literal["ndjson", "arrow"]
BuilderName = Annotated[str, Query(pattern=f"^({'|'.join(BUILDERS)})$")]
Limit = Annotated[int, Query(ge=1, le=1000)]
Name = Annotated[str, Path(pattern=r"^[A-Za-z0-9._-]{1,48}$")]


class Answer(NamedTuple):
    """The form of an answer."""

    form: Form
    builder: str
    """The builder of the samples."""
    facts: bool
    """True if samples have what the engine and the trainer reported of their tokens."""


def _answer(
    form: Annotated[Form, Query(alias="format")] = "ndjson",
    builder: BuilderName = "tree",
    facts: bool = False,
) -> Answer:
    return Answer(form, builder, facts)


Asked = Annotated[Answer, Depends(_answer)]
_V1: Final = "/bridle/v1/trajectories"
_PART: Final = ("name", "value", "source", "role", "branch", "call_id", "turn")
"""The shown facts of a reward of a session's part."""


_STREAMS: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "Trajectories: a session per line, or an Arrow stream of samples",
        "content": {
            NDJSON: {"schema": {"type": "string"}},
            ARROW: {"schema": {"type": "string", "format": "binary"}},
        },
    },
    204: {"description": "There are none now"},
}

_routes: Final = APIRouter(tags=["trajectories"])


def feed() -> APIRouter:
    """Return the routes for the proxy's application."""
    return _routes


def _stores(services: Services) -> FeedStores:
    return FeedStores(services.reader, services.feed_readers)


@_routes.post(f"{_V1}/{{consumer}}/lease", response_class=Response, responses=_STREAMS)
async def lease(
    consumer: Name,
    services: Running,
    _: Admin,
    answer: Asked,
    limit: Limit = 8,
    lease_s: Annotated[float, Query(gt=0, le=86400)] = 600.0,
    rewarded: bool = False,
    run: str | None = None,
) -> Response:
    """Lease sealed sessions until they are acknowledged or ``lease_s`` is over.

    With ``rewarded``, a session is leased after its first reward of a source that ``run``
    states; without a run, of the verifier or the operator. With ``facts``, samples have what the
    engine and the trainer reported of each token.
    """

    def take(reader: Reader, leases: Leases) -> Lease | None:
        sources = CountedRewards(reader).sources(run) if rewarded else None
        return leases.lease(consumer, limit, lease_s, run=run, rewarded_by=sources)

    def work() -> Response:
        held = _stores(services).lease(take)
        if held is None:
            return Response(status_code=204)
        sessions = [held.reader.session(one) for one in held.sessions]
        return _told(held.reader, sessions, answer, {LEASE_HEADER: held.id})

    return await asyncio.to_thread(work)


@_routes.post(f"{_V1}/{{consumer}}/leases/{{lease_id}}/ack")
async def acknowledge(consumer: Name, lease_id: str, services: Running, _: Admin) -> dict[str, Any]:
    """Mark the lease's sessions as done, so that this consumer does not get them again."""
    try:
        leases, own_id = _stores(services).leases(lease_id)
        done = await asyncio.to_thread(leases.acknowledge, consumer, own_id)
    except UnknownLease:
        raise _no_lease(lease_id) from None
    return {"acknowledged": list(done)}


@_routes.delete(f"{_V1}/{{consumer}}/leases/{{lease_id}}", status_code=204)
async def release(consumer: Name, lease_id: str, services: Running, _: Admin) -> Response:
    """Give the lease's sessions back at once."""
    try:
        leases, own_id = _stores(services).leases(lease_id)
        await asyncio.to_thread(leases.release, consumer, own_id)
    except UnknownLease:
        raise _no_lease(lease_id) from None
    return Response(status_code=204)


@_routes.get(_V1, response_class=Response, responses=_STREAMS)
async def page(
    services: Running,
    _: Admin,
    answer: Asked,
    cursor: str | None = None,
    limit: Limit = 8,
    run: str | None = None,
) -> Response:
    """Return sessions sealed after ``cursor``; ``x-bridle-cursor`` has the next cursor."""
    after = _read_cursor(cursor) if cursor else None

    def work() -> Response:
        until = time.time() - SETTLE_S
        found: list[SessionRecord] = []
        for session in services.reader.sealed_sessions(after, until=until, run=run):
            found.append(session)
            if len(found) == limit:
                break
        if not found:
            return Response(status_code=204, headers={CURSOR_HEADER: cursor or ""})
        headers = {CURSOR_HEADER: _write_cursor(found[-1])}
        return _told(services.reader, found, answer, headers)

    return await asyncio.to_thread(work)


def trajectory(episode: Episode, *, facts: bool = False) -> dict[str, Any]:
    """Return a session as a line of the feed, with arrays of one length and exact logprobs.

    With ``facts``, samples have what the engine and the trainer reported of each token.
    """
    session, table = episode.session, episode.conservation
    return {
        "session_id": session.id,
        "run_id": session.run_id,
        "task_suite": session.task_suite,
        "task_split": session.task_split,
        "task_id": session.task_id,
        "group_id": session.group_id,
        "harness": session.harness,
        "outcome": session.outcome,
        "sealed_at": session.sealed_at,
        "rules": DEFAULT_RULES.as_data(),
        "rewards": session_rewards(episode.rewards),
        "part_rewards": [
            {name: getattr(r, name) for name in _PART} for r in part_scores(episode.rewards)
        ],
        "findings": [
            {"name": r.name, "mode": r.mode, "call_id": r.call_id, "detail": r.detail}
            for r in findings_in(episode.rewards)
        ],
        "tokens": {
            "captured": table.captured,
            "trainable": table.trained,
            "masked": dict(table.masked),
            "dropped": dict(table.dropped),
        },
        "samples": [_sample(sample, facts) for sample in episode.samples],
    }


def _sample(sample: Sample, facts: bool) -> dict[str, Any]:
    values = sample_values(sample, facts=facts)
    values["samplers"] = [msgspec.to_builtins(one) for one in sample.samplers]
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }


def _told(
    reader: Reader,
    sessions: Sequence[SessionRecord],
    answer: Answer,
    headers: Mapping[str, str],
) -> Response:
    found: list[Episode] = []
    broken = 0
    for session in LoadedSession.stream(reader, sessions, counted=CountedRewards(reader)):
        try:
            episode = episode_of(session, builder=answer.builder)
            if answer.facts:
                episode = replace(episode, samples=with_scores(reader, episode.samples))
        except (BrokenTree, DamagedRows):
            broken += 1
        else:
            found.append(episode)
    headers = {**headers, BROKEN_HEADER: str(broken)}
    if answer.form == "arrow":
        try:
            return Response(_arrow(reader, found, answer.facts), media_type=ARROW, headers=headers)
        except ArrowMissing as error:
            raise ApiError("invalid_request", f"at the proxy: {error}", status=400) from error
    lines = b"".join(orjson.dumps(trajectory(one, facts=answer.facts)) + b"\n" for one in found)
    return Response(lines, media_type=NDJSON, headers=headers)


def _arrow(reader: Reader, found: Sequence[Episode], facts: bool) -> bytes:
    with needs_arrow():
        import pyarrow as pa
    names = reader.reward_names()
    rules = {b"bridle.rules": orjson.dumps(DEFAULT_RULES.as_data())}
    schema = sample_schema(names, facts=facts).with_metadata(rules)

    def rows() -> Iterator[dict[str, Any]]:
        for episode in found:
            rewards = session_rewards(episode.rewards)
            for sample in episode.samples:
                yield sample_row(episode.session, sample, names, rewards, facts=facts)

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_table(pa.Table.from_pylist(list(rows()), schema))
    return bytes(sink.getvalue())


def _write_cursor(session: SessionRecord) -> str:
    plain = orjson.dumps([session.sealed_at, session.id])
    return base64.urlsafe_b64encode(plain).decode().rstrip("=")


def _read_cursor(cursor: str) -> tuple[float, str]:
    try:
        at, identifier = orjson.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        return float(at), str(identifier)
    except (binascii.Error, ValueError, TypeError):
        raise ApiError(
            "invalid_request", "this cursor is not one of ours", status=422, param="cursor"
        ) from None


def _no_lease(lease_id: str) -> ApiError:
    message = f"there is no lease {lease_id}: it ran out, or was acknowledged or released before"
    return ApiError("not_found", message, status=404)
