"""Requests about conversation objects: what changes one is recorded, and its state is read back."""

from __future__ import annotations

import asyncio

import orjson

from bridle.proxy.calls.beside import record_at_once
from bridle.proxy.dialects.responses.conversations import (
    ConversationState,
    added_items,
    checked,
    conversation_id,
    creating_call,
    note,
    unknown,
    unknown_item,
)
from bridle.proxy.dialects.responses.input_items import page
from bridle.proxy.dialects.responses.stored import StoredResponses
from bridle.proxy.dialects.routes import Route
from bridle.proxy.http.client import Client
from bridle.proxy.services import Services
from bridle.proxy.session.harness_identity import identify, kept_headers
from bridle.proxy.session.registry import Caller
from bridle.proxy.session.session import Session
from bridle.proxy.wire.canonical import ApiError
from bridle.proxy.wire.in_flight import Held
from bridle.store.call import CallBegun, CallEnded
from bridle.store.clock import Stopwatch
from bridle.store.records import CallKind, CallStatus, new_id

_ROLE = "conversation"


class ConversationRequest:
    """One request about a conversation. Await :meth:`serve` once."""

    def __init__(self, services: Services, route: Route, client: Client) -> None:
        stored = services.stored[route.dialect.name]
        assert isinstance(stored, StoredResponses), "a dialect with conversations"  # noqa: S101
        self._services = services
        self._client = client
        self._route = route
        self._stored = stored.conversations
        self._parameters = dict(route.parameters)
        self._body = b""

    async def serve(self, held: Held, query: dict[str, str]) -> None:
        """Serve the request. Raise :class:`ApiError`."""
        client, services = self._client, self._services
        caller = await services.sessions.authenticate(client.headers, client.address)
        self._body = await client.body(services.settings.limits, held)
        identifier = self._parameters.get("conversation")
        if identifier is None:
            await self._create(caller)
            return
        readable = services.sessions.readable(caller)
        state = await asyncio.to_thread(self._stored.find, identifier, readable)
        if "items" in self._parameters:
            await self._items(caller, state, query)
        elif client.scope["method"] == "GET":
            await client.respond(200, state.shown())
        elif client.scope["method"] == "DELETE":
            deleted = {"id": state.id, "object": "conversation.deleted", "deleted": True}
            await self._change(caller, state, "delete")
            await client.respond(200, orjson.dumps(deleted))
        else:
            checked("update", self._body)
            await self._change(caller, state, "update")
            await self._show(state, caller)

    async def _create(self, caller: Caller) -> None:
        checked("create", self._body)
        sessions, identity = self._services.sessions, identify(self._client.headers)
        session = await sessions.admit(caller, self._route.session, identity)
        if session is None:
            session = await sessions.anonymous(None, identity)
        call_id = new_id("call")
        state = ConversationState(conversation_id(call_id), session.id)
        await self._record(session, call_id, "create", state.id)
        await self._show(state, caller)

    async def _items(self, caller: Caller, state: ConversationState, query: dict[str, str]) -> None:
        item, method = self._parameters.get("item"), self._client.scope["method"]
        if item is not None:
            if item not in state.items:
                raise unknown_item(item)
            if method == "GET":
                await self._client.respond(200, orjson.dumps(state.items[item]))
                return
            await self._change(caller, state, "remove", item)
            await self._show(state, caller)
            return
        if method == "GET":
            await self._client.respond(200, page(list(state.items.values()), query))
            return
        checked("add", self._body)
        call_id = await self._change(caller, state, "add")
        added = added_items(self._body, call_id)
        order = {"order": "asc", "limit": "100"}
        await self._client.respond(200, page(added, order))

    async def _show(self, state: ConversationState, caller: Caller) -> None:
        readable = self._services.sessions.readable(caller)
        now = await asyncio.to_thread(self._stored.find, state.id, readable)
        await self._client.respond(200, now.shown())

    async def _change(
        self, caller: Caller, state: ConversationState, action: str, item: str = ""
    ) -> str:
        """Record a change in the conversation's session. Return the call's id."""
        sessions, identity = self._services.sessions, identify(self._client.headers)
        session = await sessions.admit(caller, self._route.session, identity)
        session = await conversations_session(self._services, state.id, session)
        call_id = new_id("call")
        await self._record(session, call_id, action, state.id, item)
        return call_id

    async def _record(
        self, session: Session, call_id: str, action: str, identifier: str, item: str = ""
    ) -> None:
        watch = Stopwatch()
        begun = CallBegun(
            id=call_id,
            session_id=session.id,
            dialect=self._route.dialect.name,
            started_at=watch.started_at,
            stream=False,
            model_requested="",
            headers=kept_headers(self._client.headers),
            request_body=self._body,
        )
        ended = CallEnded(
            id=call_id,
            session_id=session.id,
            status=CallStatus.COMPLETE,
            ended_at=watch.now(),
            kind=CallKind.SIDE,
            role=_ROLE,
            notes=(note(action, identifier, item),),
        )
        await record_at_once(self._services, begun, ended, watch)


async def conversations_session(
    services: Services, identifier: str, named: Session | None
) -> Session:
    """Return the session of a conversation, which a request that goes on with it belongs to.

    Raise :class:`ApiError`: 404 if the request names another session, 409 if the session is sealed.
    """
    call_id = creating_call(identifier)
    session = None if call_id is None else await services.memory.session_of(call_id)
    if session is None or (named is not None and named.id != session.id):
        raise unknown(identifier)
    session = await services.sessions.current(session)
    if session.record.sealed_at is not None:
        message = f"conversation {identifier} belongs to a session that is sealed; create another"
        raise ApiError("invalid_request", message, status=409, param="conversation")
    return session
