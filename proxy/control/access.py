"""The parts of a request to the control API that its routes ask for: who calls, and what for."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from bridle.proxy.services import Services
from bridle.proxy.session.registry import Caller
from bridle.proxy.wire.canonical import ApiError
from bridle.store.records import SessionRecord


def _services(request: Request) -> Services:
    return request.app.state.running()  # type: ignore[no-any-return]


Running = Annotated[Services, Depends(_services)]


async def _caller(request: Request, services: Running) -> Caller:
    address = request.client.host if request.client else None
    return await services.sessions.authenticate(request.headers, address)


Authenticated = Annotated[Caller, Depends(_caller)]


def _admin(caller: Authenticated) -> Caller:
    if not caller.admin:
        raise ApiError("permission", "this needs the admin key", status=403)
    return caller


Admin = Annotated[Caller, Depends(_admin)]


async def _session(session_id: str, caller: Authenticated, services: Running) -> SessionRecord:
    """Return the session in the path.

    The caller needs the admin key or the session's verifier key.
    """
    if not caller.admin and caller.scores is None:
        message = "this needs the admin key or the session's verifier key"
        raise ApiError("permission", message, status=403)
    session = await found_session(session_id, services)
    if not caller.may_score(session.id):
        raise ApiError("permission", "this key does not open that session", status=403)
    return session


async def found_session(session_id: str, services: Services) -> SessionRecord:
    """Return the session as it is now. Raise 404 if there is none."""
    session = await services.sessions.find(session_id)
    if session is None:
        raise ApiError("not_found", f"there is no session {session_id}", status=404)
    return (await services.sessions.current(session)).record


ScoredSession = Annotated[SessionRecord, Depends(_session)]
