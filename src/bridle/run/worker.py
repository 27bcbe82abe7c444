"""The rollout worker: runs sessions next to the harness when a trainer asks for them over HTTP.

``POST /rounds`` takes a :class:`Round` and answers with a JSON line per finished session as it
ends, and ``{"done": true}`` after the last; a stream without it was cut. A trainer that disconnects
ends the round: its sessions are cancelled and sealed as cancelled. A worker runs only the tasks and
the harness that it was started with.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from bridle.engine.serve.transport import RequesterGone, unless_client_leaves
from bridle.harnesses.adapters.base import Adapter
from bridle.harnesses.client import Client, ControlError
from bridle.harnesses.rollout import Job, Rollout, RolloutResult, RolloutSettings, grouped
from bridle.harnesses.sandboxes.base import NotLaunchable, SandboxProvider
from bridle.harnesses.tasks.task import Task
from bridle.harnesses.verifiers import Verifier
from bridle.web_pages import NoWebPages

ROUNDS: Final = "/rounds"
HEALTH: Final = "/healthz"
HEARTBEAT_S: Final = 10.0
"""Seconds between empty lines, so that a silent connection is known to be dead."""


class Round(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a trainer asks for: ``groups`` tasks in turn from number ``first`` on."""

    run_id: str
    first: Annotated[int, msgspec.Meta(ge=0)]
    groups: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    group_size: Annotated[int, msgspec.Meta(ge=1, le=4096)]


@dataclass(frozen=True, slots=True)
class Duties:
    """What a worker runs, through which proxy, and how."""

    proxy_url: str
    adapter: Adapter
    sandboxes: SandboxProvider
    verifier: Verifier
    tasks: Sequence[Task]
    settings: RolloutSettings
    key: str | None = None
    """Admin key of the proxy; trainers must send the same."""

    def jobs(self, asked: Round) -> list[Job]:
        numbers = range(asked.first, asked.first + asked.groups)
        chosen = [self.tasks[number % len(self.tasks)] for number in numbers]
        return list(grouped(chosen, asked.group_size))


def worker_app(duties: Duties, report: Callable[[str], None]) -> Starlette:
    """The worker's HTTP routes; ``report`` is called with a line about each round."""
    slots = asyncio.Semaphore(duties.settings.parallel)

    async def rounds(request: Request) -> Response:
        if not _may(request, duties.key):
            return _refused(401, "send the admin key: Authorization: Bearer KEY")
        try:
            asked = msgspec.json.decode(await request.body(), type=Round)
        except msgspec.DecodeError as error:
            return _refused(422, str(error))
        return _Lines(_results(duties, asked, slots, report))

    async def health(_: Request) -> Response:
        return Response(b'{"status":"ok"}', media_type="application/json")

    return Starlette(
        routes=[Route(ROUNDS, rounds, methods=["POST"]), Route(HEALTH, health, methods=["GET"])],
        middleware=[Middleware(NoWebPages, only_loopback=duties.key is None)],
    )


def _may(request: Request, key: str | None) -> bool:
    sent = request.headers.get("authorization", "").removeprefix("Bearer ")
    return key is None or hmac.compare_digest(sent.encode(), key.encode())


def _refused(status: int, message: str) -> Response:
    body = msgspec.json.encode({"error": message})
    return Response(body, status, media_type="application/json")


async def _results(
    duties: Duties, asked: Round, slots: asyncio.Semaphore, report: Callable[[str], None]
) -> AsyncGenerator[dict[str, Any]]:
    """The sessions of a round as they end; all rounds share the worker's slots."""
    async with Client(duties.proxy_url, duties.key) as client:
        settings = replace(duties.settings, run_id=asked.run_id)
        rollout = Rollout(
            client, duties.adapter, duties.sandboxes, duties.verifier, settings, slots
        )
        running = [asyncio.ensure_future(rollout.one(job)) for job in duties.jobs(asked)]
        ended = 0
        try:
            for result in asyncio.as_completed(running):
                yield _as_data(await result)
                ended += 1
        except (NotLaunchable, ControlError) as error:
            report(f"round given up: {error}")
            yield {"error": str(error)}
            return
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            report(f"{ended} of {len(running)} sessions of {asked.run_id}")
    yield {"done": True}


def _as_data(result: RolloutResult) -> dict[str, Any]:
    return {
        "session_id": result.session_id,
        "outcome": result.outcome.value,
        "scores": dict(result.scores),
        "error": result.error,
    }


class _Lines(Response):
    """JSON lines; the generator is closed when the client leaves."""

    media_type = "application/x-ndjson"

    def __init__(self, values: AsyncGenerator[dict[str, Any]]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._values = values

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._values):
            with contextlib.suppress(RequesterGone):
                await unless_client_leaves(receive, self._write(send))

    async def _write(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        waiting: asyncio.Task[dict[str, Any]] | None = None
        try:
            while True:
                waiting = waiting or asyncio.create_task(anext(self._values))
                done, _ = await asyncio.wait([waiting], timeout=HEARTBEAT_S)
                line = b""
                if done:
                    try:
                        line = msgspec.json.encode(waiting.result())
                    except StopAsyncIteration:
                        break
                    waiting = None
                await send({"type": "http.response.body", "body": line + b"\n", "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            if waiting is not None and not waiting.done():
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)


def serve(duties: Duties, listener: socket.socket, report: Callable[[str], None]) -> None:
    """Serves on ``listener`` until SIGINT, SIGTERM or SIGHUP; running rounds are cancelled then."""
    asyncio.run(_serve(duties, listener, report))


async def _serve(duties: Duties, listener: socket.socket, report: Callable[[str], None]) -> None:
    config = uvicorn.Config(
        worker_app(duties, report),
        log_level="warning",
        lifespan="off",
        timeout_graceful_shutdown=1,
        timeout_keep_alive=75,
    )
    server = _Server(config)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, server.end)
    try:
        await server.serve(sockets=[listener])
    finally:
        await duties.sandboxes.close()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which would end the process before the sandbox does."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield

    def end(self) -> None:
        self.should_exit = True
