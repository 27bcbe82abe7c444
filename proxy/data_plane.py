"""The data routes: from a request's bytes to an admitted call."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

import orjson

from proxy.canonical import ApiError, Dialect, Request
from proxy.client import Client, ClientGone
from proxy.dialects.registry import COUNTING, dialect_for, speaker
from proxy.engine_request import EngineRequest, engine_request
from proxy.exchange import Exchange
from proxy.harness_identity import identify, kept_headers
from proxy.recorder import Recording
from proxy.routes import Action, Route
from proxy.sampling import effective
from proxy.services import Services
from proxy.sessions import store_unavailable
from store.errors import StoreUnavailable
from store.records import CallBegun, CallKind, SessionRecord, new_id


class DataPlane:
    """Serves what harnesses ask."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def serve(self, route: Route, client: Client) -> None:
        """Answers one request on a data route; every refusal has the dialect's own shape."""
        try:
            await self._dispatch(route, client)
        except ApiError as error:
            await self.refuse(route.dialect, client, error)
        except ClientGone:
            self._services.metrics.refused.labels(route.dialect, "client_disconnected").inc()

    async def refuse(self, dialect: Any, client: Client, error: ApiError) -> None:
        self._services.metrics.refused.labels(dialect, error.kind).inc()
        await client.refuse(speaker(dialect).error(error))

    async def _dispatch(self, route: Route, client: Client) -> None:
        method = client.scope["method"]
        if client.headers.get("upgrade", "").lower() == "websocket":
            raise ApiError("invalid_request", "WebSocket is not served; use HTTP", status=426)
        if method != route.method and not (route.method == "GET" and method == "HEAD"):
            raise ApiError("invalid_request", f"use {route.method} here, not {method}", status=405)
        if sum(len(name) + len(value) for name, value in client.scope["headers"]) > (
            self._services.settings.limits.header_bytes
        ):
            raise ApiError("too_large", "the request's headers are too large", status=431)
        match route.action:
            case Action.GENERATE:
                await self._generate(route, client)
            case Action.COUNT:
                await self._count(route, client)
            case Action.MODELS:
                await self._models(route, client)
            case Action.HELLO:
                await client.respond(200, b"")
