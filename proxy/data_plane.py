"""The data routes: from a request's bytes to an admitted call."""

from __future__ import annotations

import logging
import time
from urllib.parse import parse_qsl

from proxy.canonical import ApiError, Request
from proxy.client import Client, ClientGone
from proxy.continuation import Prompt
from proxy.dialects.registry import COUNTING, DIALECTS
from proxy.engine_request import constraint, engine_request
from proxy.exchange import Exchange
from proxy.harness_identity import identify, kept_headers
from proxy.lineage import Link
from proxy.models import models_reply
from proxy.routes import Action, Route
from proxy.sampling import effective
from proxy.services import Services
from proxy.sessions import Caller, store_unavailable
from store.errors import StoreUnavailable
from store.records import CallBegun, Continuation, SessionRecord, new_id

log = logging.getLogger("bridle.proxy")


class DataPlane:
    """Serves what harnesses ask."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def serve(self, route: Route, client: Client) -> None:
        """Answers one request on a data route; every refusal has the dialect's own shape."""
        try:
            await self._dispatch(route, client)
        except ApiError as error:
            await self._refuse(route, client, error)
        except ClientGone:
            self._services.metrics.refused.labels(route.dialect, "client_disconnected").inc()
        except Exception:
            log.exception("internal_error path=%s", client.scope["path"])
            if client.started:
                raise
            told = ApiError("internal", "the proxy failed; its log says why", status=500)
            await self._refuse(route, client, told)

    async def _refuse(
        self, route: Route, client: Client, error: ApiError, *headers: tuple[str, str]
    ) -> None:
        self._services.metrics.refused.labels(route.dialect, error.kind).inc()
        await client.refuse(DIALECTS[route.dialect].error(error), headers)

    async def _dispatch(self, route: Route, client: Client) -> None:
        method = client.scope["method"]
        if client.headers.get("upgrade", "").lower() == "websocket":
            told = ApiError("invalid_request", "WebSocket is not served; use HTTP", status=426)
            await self._refuse(route, client, told, ("upgrade", "HTTP/1.1"))
            return
        if method != route.method and not (route.method == "GET" and method == "HEAD"):
            told = ApiError("invalid_request", f"use {route.method} here, not {method}", status=405)
            await self._refuse(route, client, told, ("allow", route.method))
            return
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

    async def _generate(self, route: Route, client: Client) -> None:
        services = self._services
        caller = await services.sessions.authenticate(client.headers, client.address)
        body = await client.body(services.settings.limits.body_bytes)
        dialect = DIALECTS[route.dialect]
        request = dialect.parse(body, dict(route.parameters), _query(client))
        request = await services.stored_responses.expand(request, body)
        session, link = await self._admit(caller, route, client, request)
        prompt = self._prompt(session, link, request)
        served = await services.engines.served_model(request.model)
        sampling, notes = effective(request.sampling, session.settings)
        ask = engine_request(
            request,
            sampling,
            model=served,
            stream=request.stream or services.settings.stream_upstream,
            prompt_token_ids=prompt.token_ids,
        )
        started_at = time.time()
        call_id = new_id("call")
        begun = CallBegun(
            id=call_id,
            session_id=session.id,
            dialect=request.dialect,
            started_at=started_at,
            request_body=body,
            stream=request.stream,
            model_requested=request.model,
            parent_call_id=link.parent.call_id if link.parent is not None else None,
            lineage_rule=link.rule,
            headers=kept_headers(client.headers),
        )
        try:
            recording = services.recorder.begin(begun, session, request, link, prompt)
        except StoreUnavailable as error:
            raise store_unavailable() from error
        recording.sampling = ask.sampling
        recording.notes += (*notes, *constraint(request))
        minted = dialect.mint(call_id, int(started_at), request.model)
        await Exchange(services, client, dialect, request, minted, recording, ask).run()

    async def _admit(
        self, caller: Caller, route: Route, client: Client, request: Request
    ) -> tuple[SessionRecord, Link]:
        """The session of the request, and what of it the request continues."""
        services = self._services
        identity = identify(client.headers)
        session = await services.sessions.admit(caller, route.session, identity)
        if session is not None:
            return session, await services.conversations.find(session.id, request, identity.role)
        link, session_id = await services.conversations.find_anonymous(request)
        session = await services.sessions.anonymous(session_id, identity)
        return session, link

    async def _count(self, route: Route, client: Client) -> None:
        """The exact number of prompt tokens, by the engine's own template."""
        services = self._services
        counting = COUNTING[route.dialect]
        await services.sessions.authenticate(client.headers, client.address)
        body = await client.body(services.settings.limits.body_bytes)
        request = counting.parse(body, dict(route.parameters), _query(client))
        served = await services.engines.served_model(request.model)
        count = await services.engines.count_tokens(request, served)
        await client.respond(200, counting.reply(count))

    async def _models(self, route: Route, client: Client) -> None:
        services = self._services
        await services.sessions.authenticate(client.headers, client.address)
        reply = models_reply(
            route.dialect,
            await services.engines.models(),
            services.settings.model_aliases,
            dict(route.parameters).get("model"),
            client.headers,
        )
        await client.respond(200, reply)

    def _prompt(self, session: SessionRecord, link: Link, request: Request) -> Prompt:
        continuer = self._services.continuer
        if (
            continuer is None
            or session.continuation is Continuation.RENDERED
            or request.dialect == "completions"
        ):
            return Prompt(None, link.break_reason)
        return continuer.prompt(link, request)


def _query(client: Client) -> dict[str, str]:
    return dict(parse_qsl(client.scope["query_string"].decode("latin-1")))
