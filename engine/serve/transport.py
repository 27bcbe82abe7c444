"""Responses that notice a client's disconnect, and the server that runs an engine's app."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Final, Self, TypeVar

import orjson
import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bridle.engine.contract.errors import ConnectionCut, RequestRefused
from bridle.engine.serve.wire import DONE, event
from bridle.errors import BridleError

_STARTUP_SECONDS: Final = 30.0
_Result = TypeVar("_Result")


class RequesterGone(BridleError):
    """The client closed its connection before the reply was complete."""


async def unless_client_leaves(receive: Receive, work: Awaitable[_Result]) -> _Result:
    """Return the result of ``work``. On a disconnect, cancel it and raise :class:`RequesterGone`.

    The request's body must have been read.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise RequesterGone
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return orjson.dumps(content)


class EventStream(Response):
    """A stream of server-sent events. Its generator is closed when the client leaves.

    A refusal in mid-stream becomes an error event before ``[DONE]``, as in vLLM.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], headers: dict[str, str]) -> None:
        super().__init__(headers={**headers, "cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_client_leaves(receive, self._write(send))
        except RequesterGone:
            return

    async def _write(self, send: Send) -> None:
        started = False

        async def write(data: bytes, *, more: bool = True) -> None:
            nonlocal started
            if not started:
                started = True
                await send(self._start())
            await send({"type": "http.response.body", "body": data, "more_body": more})

        async with aclosing(self._events) as events:
            try:
                async for data in events:
                    await write(data)
            except RequestRefused as refusal:
                await write(event(refusal.body()))
            except ConnectionCut:
                if not started:
                    await write(b"")
                return
            await write(DONE, more=False)

    def _start(self) -> Message:
        return {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }


class CutResponse(Response):
    """A reply that breaks off: fewer bytes than announced, then the connection closes."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"1000")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"id":', "more_body": True})


class ServerThread:
    """A server that runs an app in a thread of its own while the context is open.

    ``port`` 0 takes a free one, which :attr:`base_url` contains. ``on_stop`` runs after the server
    has stopped.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        on_stop: Callable[[], None] | None = None,
    ) -> None:
        self._socket = socket.create_server((host, port), backlog=2048)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        self._on_stop = on_stop
        # Faults that are injected on purpose end connections early; that is not worth a log line.
        config = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_keep_alive=60)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="engine-http", daemon=True)

    @property
    def base_url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def start(self) -> None:
        self._thread.start()
        waited = threading.Event()
        deadline = _STARTUP_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or deadline <= 0:
                raise RuntimeError(f"the engine's HTTP server did not start on {self.base_url}")
            waited.wait(0.01)
            deadline -= 0.01

    def stop(self) -> None:
        """Close all connections, running streams included."""
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join()
        self._socket.close()
        if self._on_stop is not None:
            self._on_stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])
