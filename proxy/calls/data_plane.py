"""The data routes: from a request's bytes to an admitted call."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple
from urllib.parse import parse_qsl

from msgspec import structs

from bridle.proxy.calls.beside import record_at_once, serve_beside
from bridle.proxy.calls.call import Call
from bridle.proxy.calls.conversations import ConversationRequest, conversations_session
from bridle.proxy.calls.passed import PassedCall, passed_form, passed_request
from bridle.proxy.calls.replayed import serve_replayed
from bridle.proxy.continuation.roles import RoleRules
from bridle.proxy.dialects.body import asks_for_stream, model_of
from bridle.proxy.dialects.dialect import Action
from bridle.proxy.dialects.responses.request import ResponsesFields
from bridle.proxy.dialects.responses.stored import DELETED
from bridle.proxy.dialects.routes import Route
from bridle.proxy.dialects.unsupported import carried_upstream
from bridle.proxy.engines.models import models_reply
from bridle.proxy.engines.passed import pass_once
from bridle.proxy.engines.pool import EnginePool
from bridle.proxy.engines.rendering import EngineForm
from bridle.proxy.engines.request import EngineRequest, engine_request
from bridle.proxy.http.client import Client, ClientGone, encoded
from bridle.proxy.recording.recorder import begun_call
from bridle.proxy.replay.aliases import aliased
from bridle.proxy.replay.replay import UNREAD, Step
from bridle.proxy.services import Services
from bridle.proxy.session.harness_identity import Identity, identify
from bridle.proxy.session.registry import Caller, store_not_read, store_unavailable
from bridle.proxy.session.rules import effective
from bridle.proxy.session.session import Session
from bridle.proxy.session.turn import Link
from bridle.proxy.wire.canonical import ApiError, HttpError, Parse, Request
from bridle.proxy.wire.histories import History, Known, Parsed
from bridle.proxy.wire.in_flight import Held
from bridle.store.call import CallEnded
from bridle.store.clock import Stopwatch
from bridle.store.errors import StoreUnavailable
from bridle.store.records import CallKind, CallStatus, Note

log = logging.getLogger("bridle.proxy")


class Arrived(NamedTuple):
    """A request as it came, and the one decision on where it goes and in which form."""

    caller: Caller
    identity: Identity
    body: bytes
    parsed: Parsed
    to: EnginePool
    passes: bool
    """True if the engines speak the dialect and get the client's own request."""


class DataPlane:
    """The handler of harnesses' requests on the data routes."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._actions: dict[Action, Callable[[Route, Client, Held], Awaitable[None]]] = {
            Action.GENERATE: self._generate,
            Action.COUNT: self._count,
            Action.MODELS: self._models,
            Action.STORED: self._stored,
            Action.HELLO: self._hello,
            Action.BESIDE: self._beside,
            Action.CONVERSATION: self._conversation,
        }

    async def serve(self, route: Route, client: Client) -> None:
        """Reply to one request on a data route; every error has the dialect's own form."""
        held = Held(self._services.in_flight)
        try:
            if client.header_bytes > self._services.settings.limits.header_bytes:
                raise ApiError("too_large", "the request's headers are too large", status=431)
            usual = client.scope["method"] == route.at.methods and "upgrade" not in client.headers
            if not usual and await self._refuse_method(route, client):
                return
            await self._actions[route.at.action](route, client, held)
        except ApiError as error:
            await self._refuse(route, client, error)
        except ClientGone:
            self._services.metrics.refused.labels(route.dialect.name, "client_disconnected").inc()
        except StoreUnavailable as error:
            if client.started:
                raise
            await self._refuse(route, client, store_not_read(error))
        except Exception:
            log.exception("internal_error", extra={"dialect": route.dialect.name})
            if client.started:
                raise
            message = "the proxy failed; the cause is in its log"
            await self._refuse(route, client, ApiError("internal", message, status=500))
        finally:
            if held.bytes:
                held.release()

    async def _refuse(
        self, route: Route, client: Client, error: ApiError, *headers: tuple[str, str]
    ) -> None:
        self._services.metrics.refused.labels(route.dialect.name, error.kind).inc()
        fields = {"dialect": route.dialect.name, "kind": error.kind, "status": error.status}
        log.info("request_refused", extra=fields)
        await client.refuse(route.dialect.error(error), encoded(headers))

    async def _refuse_method(self, route: Route, client: Client) -> bool:
        """Refuse WebSocket and a method that the route does not take.

        Return True if the request was refused.
        """
        method = client.scope["method"]
        if client.headers.get("upgrade", "").lower() == "websocket":
            error = ApiError("invalid_request", "WebSocket is not served; use HTTP", status=426)
            await self._refuse(route, client, error, ("upgrade", "HTTP/1.1"))
            return True
        if _allowed(method, route):
            return False
        error = ApiError(
            "invalid_request", f"use {route.at.methods} here, not {method}", status=405
        )
        await self._refuse(route, client, error, ("allow", route.at.methods))
        return True

    async def _generate(self, route: Route, client: Client, held: Held) -> None:
        services = self._services
        dialect = route.dialect
        arrived = await self._arrived(route, client, held, dialect.parse)
        session, link, step, arrived = await self._placed(route, client, arrived)
        _, _, body, (_, _, repeats), to, passes = arrived
        request = step.request
        if step.aliases:
            dialect = aliased(dialect, step.aliases)
        if step.replayed is not None:
            await serve_replayed(services, client, dialect, body, session, link, step)
            return
        if link.unfolded is not None:
            noted = Note("turns_unfolded", f"{len(request.messages)} messages")
            request = structs.replace(
                request, messages=link.unfolded, notes=(*request.notes, noted)
            )
        watch = Stopwatch()
        overruled: tuple[Note, ...] = ()
        if passes:
            form = passed_form(to, request)
            ask = passed_request(dialect, route, client, request, step.body or body)
        else:
            form = await services.templates[to].form(session, link, request, step.prompt)
            ask, overruled = self._asked(form, session)
        budget = services.budgets.of(session.record.settings)
        if (request.sampling.n or 1) > services.settings.limits.choices:
            message = f"at most {services.settings.limits.choices} choices (n) are served"
            raise ApiError("invalid_request", message, status=400, param="n")
        notes = [*request.notes, *step.notes]
        if link.unknown:
            still_open = services.memory.running(link.unknown)
            notes += [Note("echoed_call_still_open", call_id) for call_id in still_open]
        notes += (*to.notes, *form.notes, *overruled, *ask.notes)
        refusal = None if budget is None else await services.budgets.refusal(session, budget)
        try:
            recording = services.recorder.begin(
                session, request, body, client.headers, watch, link, form.prompt, repeats
            )
        except StoreUnavailable as error:
            raise store_unavailable() from error
        kind = PassedCall if passes else Call
        call = kind(services, client, dialect, recording, ask, form, notes, held)
        if (refused := step.refusal or form.refusal) is not None:
            await call.refuse(refused)
        elif refusal is not None:
            reason, note = refusal
            notes.append(note)
            await call.refuse(reason)
        else:
            await call.serve()

    def _asked(self, form: EngineForm, session: Session) -> tuple[EngineRequest, tuple[Note, ...]]:
        """Return the request for the engine, and notes on what the session's rules changed."""
        request, to, rules = form.request, form.pool, session.record.settings
        sampling = request.sampling
        overruled: tuple[Note, ...] = ()
        if rules:
            sampling, overruled = effective(sampling, rules, pinned=not to.external)
        ask = engine_request(
            request,
            sampling,
            stream=request.stream or self._services.settings.stream_upstream,
            prompt=form.prompt,
            messages=form.written,
            external=to.external,
        )
        return ask, overruled

    async def _arrived(self, route: Route, client: Client, held: Held, parse: Parse) -> Arrived:
        """Return the request, its caller and its engines.

        Raises :class:`ApiError` for a model name that no database can store.
        """
        services, identity = self._services, identify(client.headers)
        caller = await services.sessions.authenticate(client.headers, client.address)
        known: Sequence[History] = ()
        if route.dialect.parse_on is not None and route.at.action is Action.GENERATE:
            known = self._known(caller, route, identity)
        earlier = [one.body for one in known]
        body, repeats = await client.body_after(earlier, services.settings.limits, held)
        path, query = dict(route.parameters), _query(client)
        to = self._speaking(route, identity, body)
        if to is not None:
            parsed = Parsed(await self._carried(route, client, caller, body, parse))
        elif (parse_on := route.dialect.parse_on) and route.at.action is Action.GENERATE:
            parsed = parse_on(body, path, query, Known(known, repeats))
        else:
            parsed = Parsed(parse(body, path, query))
        model = parsed.request.model
        if "\0" in model:
            message = "a model's name cannot contain a NUL character"
            raise ApiError("invalid_request", message, status=400, param="model")
        if to is not None:
            return Arrived(caller, identity, body, parsed, to, passes=True)
        whole = await self._whole(route, caller, parsed.request, body)
        to = services.models.only or services.models.find(model, identity.role)
        return Arrived(caller, identity, body, parsed._replace(request=whole), to, passes=False)

    def _speaking(self, route: Route, identity: Identity, body: bytes) -> EnginePool | None:
        """Return the request's engines if they speak its dialect and get it as it is."""
        models, name = self._services.models, route.dialect.name
        if not models.speak(name):
            return None
        model = dict(route.parameters).get("model") or model_of(body)
        to = None if model is None else models.find(model, identity.role)
        return to if to is not None and name in to.speaks else None

    async def _carried(
        self, route: Route, client: Client, caller: Caller, body: bytes, parse: Parse
    ) -> Request:
        """Return a request that its upstream gets as it is, read only for the record.

        Whatever cannot be read of it is left to the upstream, with a note.
        """
        parameters, query = dict(route.parameters), _query(client)
        with carried_upstream():
            try:
                request = parse(body, parameters, query)
            except ApiError as error:
                model = parameters.get("model") or model_of(body) or ""
                request = Request(
                    dialect=route.dialect.name,
                    model=model,
                    stream=asks_for_stream(body),
                    notes=(Note(UNREAD, error.message[:200]),),
                )
            try:
                request = await self._whole(route, caller, request, body)
            except ApiError:
                request = structs.replace(
                    request, notes=(*request.notes, Note("history_at_upstream"))
                )
        return request

    async def _parsed_again(
        self, route: Route, client: Client, caller: Caller, passes: bool, body: bytes
    ) -> Request:
        """Return the request of another ``body`` that came by the same route."""
        parse = route.dialect.parse
        if passes:
            return await self._carried(route, client, caller, body, parse)
        request = parse(body, dict(route.parameters), _query(client))
        return await self._whole(route, caller, request, body)

    async def _whole(self, route: Route, caller: Caller, request: Request, body: bytes) -> Request:
        """Return ``request``, parsed from ``body``, with the recorded parts that it refers to."""
        refers = request.previous_response_id is not None or request.references
        if not refers and _conversation_of(request) is None:
            return request
        services = self._services
        readable = services.sessions.readable(caller)
        return await services.stored[route.dialect.name].expand(request, body, readable)

    def _known(self, caller: Caller, route: Route, identity: Identity) -> list[History]:
        """Return the bodies that a body of this client may go on from.

        They are those of its own session, and of the anonymous ones if it names none.
        """
        services = self._services
        named, session = services.sessions.named_by(caller, route.session, identity)
        if session is not None:
            return session.trails.histories()
        return [] if named else services.memory.anonymous_trails.histories()

    async def _placed(
        self, route: Route, client: Client, arrived: Arrived
    ) -> tuple[Session, Link, Step, Arrived]:
        """Return the session of a request, its link to an earlier call, and its step there.

        The step has the request itself, unless the session re-enters another one. A re-entry that
        asks another model may have other engines.
        """
        services, (caller, identity, body, parsed, *_) = self._services, arrived
        request, history, _ = parsed
        session = await services.sessions.admit(caller, route.session, identity)
        conversation = _conversation_of(request)
        if conversation is not None and not arrived.passes:
            session = await conversations_session(services, conversation, session)
        if session is None:
            session, link = await self._anonymous(caller, identity, request, history)
            return session, link, Step(request), arrived
        role, memory = identity.role, services.memory
        replay = await services.replays.of(session)
        if replay is None:
            link = await memory.find(session, request, role, history)
            return session, link, Step(request), arrived
        await memory.load(session)
        arrived = await self._for_model(route, client, arrived, replay.model)
        parse = partial(self._parsed_again, route, client, caller, arrived.passes)
        native = route.dialect.native if arrived.passes else None
        wording = None if native is None else native.wording
        step = await replay.step(session, arrived.parsed.request, body, role, parse, wording)
        return session, await memory.find(session, step.request, role), step, arrived

    async def _for_model(
        self, route: Route, client: Client, arrived: Arrived, model: str | None
    ) -> Arrived:
        """Return a request with the engines of another ``model``, read in the form for them."""
        if model is None:
            return arrived
        caller, identity, body, parsed, *_ = arrived
        to = self._services.models.find(model, identity.role)
        passes = route.dialect.name in to.speaks
        if passes != arrived.passes:
            request = await self._parsed_again(route, client, caller, passes, body)
            parsed = parsed._replace(request=request)
        return arrived._replace(parsed=parsed, to=to, passes=passes)

    async def _anonymous(
        self, caller: Caller, identity: Identity, request: Request, history: History | None
    ) -> tuple[Session, Link]:
        """Return the session of a request that names none, and its link to an earlier call."""
        services, role = self._services, identity.role
        link, continued = await services.memory.find_anonymous(request, role, history)
        if continued is not None and not caller.may_read(continued.record):
            # It echoes an id of a session whose key it does not have.
            continued = None
        session = await services.sessions.anonymous(continued, identity)
        if link.parent is not None and session is not continued:
            # The session that it continues is closed: all its messages are new in this one.
            link = services.memory.find_first(request, role)
        return session, link

    async def _count(self, route: Route, client: Client, held: Held) -> None:
        """Reply with the exact number of prompt tokens by the engine's own template."""
        services = self._services
        counting = route.dialect.count
        assert counting is not None, "its dialect has such a path"  # noqa: S101
        arrived = await self._arrived(route, client, held, counting.parse)
        caller, identity, body, (request, *_), to, passes = arrived
        session = await services.sessions.admit(caller, route.session, identity)
        if session is None:
            find = services.memory.find_anonymous
            _, session = await find(request, identity.role, begins=False)
            if session is not None and not caller.may_read(session.record):
                session = None
        watch, passed, served = Stopwatch(), None, None
        usage: dict[str, int] = {}
        if passes:
            ask = passed_request(route.dialect, route, client, request, body)
            passed = await pass_once(to, ask)
            reply = passed.body
        else:
            template = services.templates[to]
            rules = await template.rules(request) or RoleRules()
            shaped = structs.replace(request, messages=rules.shape(request.messages)[0])
            shaped, _ = template.fitted(shaped)
            count, served = await to.count_tokens(shaped)
            reply, usage = counting.reply(count), {"prompt_tokens": count}
        if session is None:
            # Nothing in the request identifies its session.
            services.metrics.events.labels("count_without_session").inc()
        else:
            begun = begun_call(session.id, request, body, client.headers, watch.started_at)
            ended = CallEnded(
                id=begun.id,
                session_id=session.id,
                status=_status(passed),
                ended_at=watch.now(),
                kind=CallKind.COUNT,
                role=identity.role,
                response_body=reply,
                model_served=served,
                usage=usage,
                notes=request.notes,
                policy=to.policy,
            )
            await record_at_once(services, begun, ended, watch)
        if passed is None:
            await client.respond(200, reply)
        else:
            await client.refuse(passed)

    async def _beside(self, route: Route, client: Client, held: Held) -> None:
        await serve_beside(self._services, route, client, held)

    async def _conversation(self, route: Route, client: Client, held: Held) -> None:
        await ConversationRequest(self._services, route, client).serve(held, _query(client))

    async def _hello(self, _: Route, client: Client, __: Held) -> None:
        await client.respond(200, b"")

    async def _stored(self, route: Route, client: Client, _: Held) -> None:
        """Reply with a stored response as its client got it, or delete it.

        A deleted response is hidden from clients and stays in the record.
        """
        services = self._services
        caller = await services.sessions.authenticate(client.headers, client.address)
        response_id = dict(route.parameters)["response"]
        stored = services.stored[route.dialect.name]
        call = await stored.find(response_id)
        readable = services.sessions.readable(caller)
        if call is None or not readable(call.session_id):
            raise stored.unknown(response_id)
        if "part" in dict(route.parameters):
            await client.respond(200, await stored.inputs(call, _query(client)))
            return
        whole = await stored.whole(call)
        if whole is None:
            raise stored.unknown(response_id)
        if client.scope["method"] != "DELETE":
            await client.respond(200, whole)
            return
        try:
            await services.writer.set_notes(call.id, (*call.notes, DELETED))
        except StoreUnavailable as error:
            raise store_unavailable() from error
        stored.forget(call.id)
        await client.respond(200, stored.deleted(response_id))

    async def _models(self, route: Route, client: Client, _: Held) -> None:
        services = self._services
        await services.sessions.authenticate(client.headers, client.address)
        reply = models_reply(
            route.dialect.models,
            await services.engines.models(),
            services.models.names(),
            dict(route.parameters).get("model"),
        )
        await client.respond(200, reply)


def _conversation_of(request: Request) -> str | None:
    """Return the id of the conversation object that the request goes on with."""
    own = request.own
    return own.conversation if isinstance(own, ResponsesFields) else None


def _status(passed: HttpError | None) -> CallStatus:
    refused = passed is not None and passed.status >= 400
    return CallStatus.FAILED if refused else CallStatus.COMPLETE


def _query(client: Client) -> dict[str, str]:
    return dict(parse_qsl(client.scope["query_string"].decode("latin-1")))


def _allowed(method: str, route: Route) -> bool:
    allowed = route.at.methods.split(", ")
    return method in allowed or (method == "HEAD" and "GET" in allowed)
