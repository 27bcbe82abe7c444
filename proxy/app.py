"""The proxy as one ASGI application: data routes straight to the data plane, the rest to FastAPI.

Data requests never pass through the control framework: at thousands of calls a second its routing
and middleware would cost more than the call.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from fastapi import APIRouter

from proxy.canonical import ApiError
from proxy.client import Client, Receive, Scope, Send
from proxy.control import control_api
from proxy.data_plane import DataPlane
from proxy.dialects.registry import DIALECTS
from proxy.logs import configure
from proxy.routes import implied_dialect, route
from proxy.services import Services
from proxy.settings import ProxySettings

log = logging.getLogger("bridle.proxy")

_CONTROL: Final = ("/bridle/", "/healthz", "/readyz", "/metrics", "/docs", "/openapi.json")


class App:
    """An ASGI application. Its services live from lifespan start-up to shutdown."""

    def __init__(self, settings: ProxySettings, routers: Sequence[APIRouter] = ()) -> None:
        self.settings = settings
        self.services: Services | None = None
        self._data_plane: DataPlane | None = None
        self._control = control_api(self._running, routers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await send({"type": "websocket.close", "code": 1003})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path.startswith(_CONTROL):
            await self._control(scope, receive, send)
            return
        client = Client(scope, receive, send)
        data_plane = self._data_plane
        found = route(path)
        if found is not None and data_plane is not None:
            await data_plane.serve(found, client)
            return
        if data_plane is None:
            error = ApiError("overloaded", "the proxy is starting or stopping", status=503)
        else:
            error = ApiError("not_found", f"nothing is served at {path}", status=404)
        await client.refuse(DIALECTS[implied_dialect(path)].error(error))

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self.start()
        except Exception as error:
            log.exception("start_failed")
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def start(self) -> None:
        """Opens the store and the connections to the engine."""
        if self.settings.log_format is not None:
            configure(self.settings.log_format, self.settings.log_level)
        self.services = await Services.start(self.settings)
        self._data_plane = DataPlane(self.services)

    async def stop(self) -> None:
        services, self.services, self._data_plane = self.services, None, None
        if services is not None:
            await services.close()

    def _running(self) -> Services:
        if self.services is None:
            raise ApiError("overloaded", "the proxy is starting or stopping", status=503)
        return self.services


def create_app(settings: ProxySettings, routers: Sequence[APIRouter] = ()) -> App:
    """The application for ``settings``, to be served by any ASGI server with lifespan.

    ``routers`` extend the control API, under ``/bridle/``: their endpoints may ask for
    ``proxy.control.Admin`` and ``proxy.control.Running``, and are in its OpenAPI.
    """
    return App(settings, routers)
