"""The proxy as one ASGI application. Data routes go to the data plane, the others to FastAPI.

Data requests never pass through the control framework: at thousands of calls a second its routing
and middleware would cost more than the call.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from bridle.proxy.calls.data_plane import DataPlane
from bridle.proxy.control.probes import PROBES, Probe, Running
from bridle.proxy.dialects.errors import openai_error
from bridle.proxy.dialects.registry import served
from bridle.proxy.dialects.routes import Routes
from bridle.proxy.http.client import AsgiMessage, Client, ClientGone, Receive, Scope, Send
from bridle.proxy.http.protocol import EXTENSION, ConnectionLimits, connections_allowed
from bridle.proxy.recording.logs import configure
from bridle.proxy.services import CannotStart, Services
from bridle.proxy.session.registry import store_not_read
from bridle.proxy.settings import ProxySettings
from bridle.proxy.wire.canonical import ApiError
from bridle.proxy.wire.in_flight import Held
from bridle.proxy.wire.types import examine
from bridle.store.errors import StoreUnavailable
from bridle.web_pages import Refusal, refusal

if TYPE_CHECKING:
    from fastapi import APIRouter, FastAPI

log = logging.getLogger("bridle.proxy")

_CLOSED: Final = "/bridle/"
_CONTROL: Final = (_CLOSED, "/openapi.json")

Routers = Sequence["Callable[[], APIRouter]"]
"""Functions that make further routers of the control API. They are called at its first request."""


class PagesApp(Protocol):
    """The application under ``PAGES``."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    async def close(self) -> None:
        """Stop what the application has started."""


Pages = Callable[[Running], PagesApp]
"""A function that makes the application served under ``PAGES``, for people to look at. It is called
at the first request. The application itself decides who may see a page."""
PAGES: Final = "/bridle/viewer"


class App:
    """An ASGI application. Its services live from lifespan start-up to shutdown."""

    def __init__(
        self, settings: ProxySettings, routers: Routers = (), pages: Pages | None = None
    ) -> None:
        self.settings = settings
        self._dialects = served(settings.dialects)
        self._routes = Routes(self._dialects)
        examine()
        self.services: Services | None = None
        self.refusal: str | None = None
        """The reason why the proxy did not start, if the user can correct it."""
        self._data_plane: DataPlane | None = None
        self.connection_limits: ConnectionLimits | None = None
        """The limits that ``proxy/http/protocol.py`` applies; ``None`` until the start."""
        self.listener: socket.socket | None = None
        """The socket from which ``proxy/http/protocol.py`` accepts all connections that wait, if no
        other process accepts from it."""
        self._reached: dict[str, float] = {}
        """Monotonic time at which each limit was last logged, by the limit's name."""
        self._routers = routers
        self._control: asyncio.Future[FastAPI] | None = None
        self._make_pages = pages
        self._pages: asyncio.Future[PagesApp] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003})
            return
        client = Client(scope, receive, send)
        if (refused := refusal(scope["headers"])) is not None:
            await self._refuse_page(client, refused)
            return
        found = self._routes.find(scope["path"], scope["method"], client.headers)
        data_plane = self._data_plane
        try:
            if found is not None and data_plane is not None:
                await data_plane.serve(found, client)
            else:
                await self._beside(client, receive, send)
        finally:
            # It refers to the server's own record of the request, which refers to the scope.
            scope.get("extensions", {}).pop(EXTENSION, None)

    async def _refuse_page(self, client: Client, refused: Refusal) -> None:
        kind = "permission" if refused.status == 403 else "invalid_request"
        error = ApiError(kind, refused.message, status=refused.status)
        await client.refuse(self._routes.dialect_of(client.scope["path"]).error(error))

    async def _beside(self, client: Client, receive: Receive, send: Send) -> None:
        """Serve a request that is not for a data route."""
        path = client.scope["path"]
        if self._make_pages is not None and (path == PAGES or path.startswith(f"{PAGES}/")):
            if self._pages is None:
                making = asyncio.to_thread(self._make_pages, self._running)
                self._pages = asyncio.ensure_future(making)
            await (await asyncio.shield(self._pages))(client.scope, receive, send)
        elif path.startswith(_CONTROL):
            await self._controlled(client.scope, client, receive, send)
        elif (probe := PROBES.get(path)) is not None:
            await self._probe(probe, client)
        else:
            error = self._routes.nothing_at(path)
            if self._data_plane is None:
                error = ApiError("overloaded", "the proxy is starting or stopping", status=503)
            await client.refuse(self._routes.dialect_of(path).error(error))

    async def _probe(self, probe: Probe, client: Client) -> None:
        try:
            if client.scope["method"] in ("GET", "HEAD"):
                await probe(client, self._running)
                return
            error = ApiError("invalid_request", "use GET here", status=405)
            await client.refuse(openai_error(error), ((b"allow", b"GET, HEAD"),))
        except ApiError as failure:
            await client.refuse(openai_error(failure))

    async def _controlled(self, scope: Scope, client: Client, receive: Receive, send: Send) -> None:
        """Authenticate the request and read its body, then pass it to the control framework.

        The framework itself would read a body of any length before it authenticates.
        """
        try:
            services = self._running()
            if scope["path"].startswith(_CLOSED):
                await services.sessions.authenticate(client.headers, client.address)
            held = Held(services.in_flight)
            try:
                body = await client.body(services.settings.limits, held)
            finally:
                held.release()
        except ApiError as error:
            await client.refuse(openai_error(error))
            return
        except StoreUnavailable as error:
            await client.refuse(openai_error(store_not_read(error)))
            return
        except ClientGone:
            return
        waiting = [{"type": "http.request", "body": body, "more_body": False}]

        async def read() -> AsgiMessage:
            return waiting.pop() if waiting else await receive()

        await (await self._control_api())(scope, read, send)

    async def _control_api(self) -> FastAPI:
        """Return the control API, which is made at its first use.

        It takes a fifth of the proxy's memory, and many proxies only get data requests.
        """
        if self._control is None:
            making = asyncio.to_thread(_control_api, self._running, self._routers)
            self._control = asyncio.ensure_future(making)
        return await asyncio.shield(self._control)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self.start()
        except CannotStart as error:
            self.refusal = str(error)
            await send({"type": "lifespan.startup.failed", "message": self.refusal})
            return
        except Exception as error:
            log.exception("start_failed")
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def start(self) -> None:
        """Open the store and the connections to the engine."""
        if self.settings.log_format is not None:
            configure(self.settings.log_format, self.settings.log_level)
        self.services = await Services.start(self.settings, self._dialects)
        limits = self.settings.limits
        connections = connections_allowed(limits.connections)
        if connections < limits.connections:
            extra = {"connections": connections, "wanted": limits.connections}
            log.warning("connections_limited_by_files", extra=extra)
        self.connection_limits = ConnectionLimits(
            connections, limits.head_timeout_s, limits.body_timeout_s, self._limit_reached
        )
        self._data_plane = DataPlane(self.services)

    async def stop(self) -> None:
        pages, self._pages = self._pages, None
        if pages is not None:
            await (await pages).close()
        services, self.services, self._data_plane = self.services, None, None
        if services is not None:
            await services.close()

    def _limit_reached(self, limit: str) -> None:
        """Count a connection that a limit ended, and log each limit at most once a second."""
        if self.services is not None:
            self.services.metrics.events.labels(f"limit_{limit}").inc()
        now = time.monotonic()
        if now - self._reached.get(limit, float("-inf")) > 1:
            self._reached[limit] = now
            log.warning("limit_reached", extra={"limit": limit})

    def _running(self) -> Services:
        if self.services is None:
            raise ApiError("overloaded", "the proxy is starting or stopping", status=503)
        return self.services


def _control_api(running: Running, routers: Routers) -> FastAPI:
    from bridle.proxy.control.api import control_api

    return control_api(running, [make() for make in routers])


def create_app(settings: ProxySettings, routers: Routers = (), pages: Pages | None = None) -> App:
    """Return the application for ``settings``, to be served by any ASGI server with lifespan.

    ``routers`` make further routes of the control API, under ``/bridle/``. Their endpoints may ask
    for ``bridle.proxy.control.api.Admin`` and ``bridle.proxy.control.api.Running``, and are in its
    OpenAPI. ``pages`` makes the application under ``/bridle/viewer``.
    """
    return App(settings, routers, pages)
