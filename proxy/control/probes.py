"""Health and metrics routes, which supervisors and collectors read every few seconds.

They do not use FastAPI, so a proxy that serves only these never imports it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import orjson

from bridle.proxy.http.client import Client
from bridle.proxy.services import Services
from bridle.proxy.wire.canonical import ApiError

Running = Callable[[], Services]
"""A function that returns the services, or raises :class:`ApiError` (503) while there are none."""
Probe = Callable[[Client, Running], Awaitable[None]]
"""A function that replies to one request. It may raise :class:`ApiError`."""


async def health(client: Client, _: Running) -> None:
    """Reply 200 while the process runs, with its clock in seconds since 1970."""
    await client.respond(200, orjson.dumps({"status": "ok", "time": time.time()}))


async def ready(client: Client, running: Running) -> None:
    """Reply 503 while a policy has no usable engine or the last write to the store failed.

    ``circuits`` has the state of each engine's circuit.
    """
    services = running()
    pools = services.models.policies.values()
    well = all(await asyncio.gather(*(pool.check() for pool in pools)))
    circuits = [state.circuit for state in services.models.states()]
    status = "ready" if well else "engine_unreachable"
    if not services.writer.well:
        well, status = False, "store_unavailable"
    body = orjson.dumps({"status": status, "circuits": circuits})
    await client.respond(200 if well else 503, body)


async def front(client: Client, _: Running) -> None:
    """Reply with what this address is, to a person who opens it in a browser."""
    await client.respond(200, orjson.dumps(_FRONT, option=orjson.OPT_INDENT_2))


async def metrics(client: Client, running: Running) -> None:
    """Reply with this process's metrics as Prometheus text.

    Raise :class:`ApiError` without the admin key.
    """
    services = running()
    caller = await services.sessions.authenticate(client.headers, client.address)
    if not caller.admin:
        raise ApiError("permission", "this needs the admin key", status=403)
    await client.respond(200, services.metrics.exposition(), b"text/plain; version=0.0.4")


_FRONT: Final = {
    "this is": "a Bridle proxy, which records the calls of agents whose base URL it is",
    "base URL of OpenAI clients": "/v1",
    "base URL of Anthropic and Google clients": "/",
    "recorded sessions in a browser": "run `bridle viewer`, or start the proxy with --viewer and "
    "open /bridle/viewer",
    "health": "/healthz",
    "readiness": "/readyz",
    "control API": "/openapi.json, with the admin key",
}
PROBES: Final[Mapping[str, Probe]] = {
    "/": front,
    "/healthz": health,
    "/readyz": ready,
    "/metrics": metrics,
}
