"""Requests beside the conversation: they are recorded when they are over, and train nothing."""

from __future__ import annotations

from typing import Any

import msgspec

from bridle.proxy.dialects.routes import Route
from bridle.proxy.http.client import Client
from bridle.proxy.services import Services
from bridle.proxy.session.harness_identity import identify, kept_headers
from bridle.proxy.session.registry import store_unavailable
from bridle.proxy.wire.in_flight import Held
from bridle.store.call import CallBegun, CallEnded
from bridle.store.clock import Stopwatch
from bridle.store.errors import StoreUnavailable
from bridle.store.records import CallKind, CallStatus, new_id


async def serve_beside(services: Services, route: Route, client: Client, held: Held) -> None:
    """Pass a request on to the upstream of its route, record both, and send the reply.

    A request that names no session is not recorded, because nothing in it identifies one. Raise
    :class:`bridle.proxy.wire.canonical.ApiError`.
    """
    identity = identify(client.headers)
    caller = await services.sessions.authenticate(client.headers, client.address)
    body = await client.body(services.settings.limits, held)
    session = await services.sessions.admit(caller, route.session, identity)
    parameters = dict(route.parameters)
    name, query = parameters["route"], client.scope["query_string"].decode("latin-1")
    target = f"/v1/{name}{parameters['rest'] or ''}" + (f"?{query}" if query else "")
    watch = Stopwatch()
    reply = await services.beside.ask(name, client.scope["method"], target, client.headers, body)
    if session is None:
        services.metrics.events.labels("beside_without_session").inc()
    else:
        begun = CallBegun(
            id=new_id("call"),
            session_id=session.id,
            dialect=name,
            started_at=watch.started_at,
            stream=False,
            model_requested=str(_read(body).model).replace("\0", ""),
            headers=kept_headers(client.headers),
            request_body=body,
        )
        refused = reply.status >= 400
        ended = CallEnded(
            id=begun.id,
            session_id=session.id,
            status=CallStatus.FAILED if refused else CallStatus.COMPLETE,
            ended_at=watch.now(),
            kind=CallKind.SIDE,
            role=name,
            reason="upstream_error" if refused else None,
            error={"status": reply.status} if refused else {},
            response_body=reply.body,
            usage=_counts(_read(reply.body).usage),
        )
        await record_at_once(services, begun, ended, watch)
    await client.respond(reply.status, reply.body, reply.content_type.encode("latin-1"))


async def record_at_once(
    services: Services, begun: CallBegun, ended: CallEnded, watch: Stopwatch
) -> None:
    """Record the beginning and the end of a call. Raise :class:`ApiError` if the store cannot."""
    try:
        services.writer.begin_call(begun)
        await services.writer.end_call(ended)
    except StoreUnavailable as error:
        services.metrics.unrecorded.inc()
        raise store_unavailable() from error
    services.metrics.count_call(begun.dialect, begun.started_at, ended, watch.now())


class _Fields(msgspec.Struct):
    """The fields that the record has apart. Long lists beside them are skipped, not made."""

    model: Any = ""
    usage: Any = None


def _read(body: bytes) -> _Fields:
    """Return the fields of a JSON object; those of an empty one for any other body."""
    try:
        return msgspec.json.decode(body, type=_Fields)
    except msgspec.DecodeError:
        return _Fields()


def _counts(usage: Any) -> dict[str, int]:
    if not isinstance(usage, dict):
        return {}
    names = ("prompt_tokens", "completion_tokens")
    return {name: usage[name] for name in names if type(usage.get(name)) is int}
