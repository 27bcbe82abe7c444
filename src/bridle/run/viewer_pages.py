"""The viewer on a proxy, under ``/bridle/viewer``, for people who have the admin key.

The key comes in a header, or once in a form. After the form, a cookie holds the time until which
its holder may look; no script can read it, and no other site's page can send it. Every process that
has the admin key can check the cookie, so that none keeps a list of them. A page of another origin
is refused before it gets here (``bridle/web_pages.py``).
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import Mapping
from functools import partial
from typing import Final

from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from bridle.errors import BridleError
from bridle.proxy.app import PAGES
from bridle.proxy.control.api import add_reward
from bridle.proxy.control.models import NewReward
from bridle.proxy.control.probes import Running
from bridle.proxy.services import Services
from bridle.proxy.session.keys import same
from bridle.proxy.session.registry import Caller
from bridle.proxy.settings import is_loopback
from bridle.proxy.wire.canonical import ApiError
from bridle.run.pages_process import PagesProcess
from bridle.viewer.app import bare_app
from bridle.viewer.rendering import failure, render
from bridle.viewer.scoring import Record, ScoreForm, read_form, scored

COOKIE: Final = "bridle_viewer"
SIGNED_IN_S: Final = 12 * 3600
"""Seconds for which a cookie is valid."""


class SignInNeeded(BridleError):
    """The request has neither the admin key nor a valid cookie."""


class ViewerPages:
    """The pages over the store of a proxy, as an application.

    This process answers the form and records what the pages send. A process of its own makes the
    pages (:class:`PagesProcess`), so that they do not delay calls.
    """

    def __init__(self, app: FastAPI, process: PagesProcess) -> None:
        self.process = process
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def close(self) -> None:
        """End the process that makes the pages."""
        await self.process.close()


def viewer_pages(running: Running) -> ViewerPages:
    """Return the pages over the store of the proxy whose services ``running`` returns."""
    process = PagesProcess(running().settings.store_url, PAGES)
    app = bare_app("", PAGES)
    form_token = partial(_form_token, running, secrets.token_urlsafe(32))

    @app.get(f"{PAGES}/login")
    def login(request: Request) -> Response:
        return render("login.html", request, wrong=False)

    @app.post(f"{PAGES}/login")
    async def signed_in(request: Request) -> Response:
        settings = running().settings
        form = await read_form(request)
        key = settings.admin_key
        if key is not None and not same(form.get("key", ""), key):
            page = await asyncio.to_thread(render, "login.html", request, wrong=True)
            page.status_code = 401
            return page
        reply = RedirectResponse(f"{PAGES}/sessions", 303)
        reply.set_cookie(
            COOKIE,
            _cookie(key or "", int(time.time()) + SIGNED_IN_S),
            max_age=SIGNED_IN_S,
            path=PAGES,
            secure=(settings.public_url or str(request.url)).startswith("https:"),
            httponly=True,
            samesite="strict",
        )
        return reply

    @app.post(f"{PAGES}/sessions/{{session_id}}/rewards")
    async def annotate(request: Request, session_id: str) -> Response:
        services = running()
        await _require_admin(request, services)
        return await scored(request, session_id, form_token(), _recording(services))

    @app.get(f"{PAGES}/sessions/{{session_id}}/rewards")
    def sent_alone(session_id: str) -> Response:
        return Response(status_code=405, headers={"allow": "POST"})

    @app.get(PAGES)
    @app.get(f"{PAGES}/{{path:path}}")
    async def page(request: Request) -> Response:
        await _require_admin(request, running())
        return await process.answer(request, ScoreForm(form_token(), _near(request)))

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: Exception) -> Response:
        page = failure(request, error)
        page.status_code = error.status if isinstance(error, ApiError) else 500
        return page

    @app.exception_handler(SignInNeeded)
    async def sign_in(request: Request, error: Exception) -> Response:
        if "hx-request" in request.headers:
            return Response(status_code=401, headers={"hx-redirect": f"{PAGES}/login"})
        return RedirectResponse(f"{PAGES}/login", 303)

    return ViewerPages(app, process)


async def _require_admin(request: Request, services: Services) -> None:
    """Raise :class:`SignInNeeded` if the request has neither the admin key nor a valid cookie."""
    key = services.settings.admin_key
    if key is not None and _valid(request.cookies.get(COOKIE, ""), key):
        return
    address = request.client.host if request.client else None
    try:
        caller = await services.sessions.authenticate(request.headers, address)
    except ApiError as error:
        raise SignInNeeded(error.message) from error
    if not caller.admin:
        raise SignInNeeded("the viewer needs the admin key")


def _form_token(running: Running, instead: str) -> str:
    """Return the token of the pages' form, made of the admin key, or of ``instead`` without one."""
    key = running().settings.admin_key or instead
    return hmac.digest(key.encode(), b"viewer form", "sha256").hex()


def _near(request: Request) -> bool:
    """Return whether the request comes from this machine.

    A reverse proxy on this machine passes on the host that a person elsewhere asked for.
    """
    address = request.client.host if request.client else None
    return is_loopback(address) and is_loopback(request.url.hostname)


def _recording(services: Services) -> Record:
    """Return the function that records what the pages' form sends, like the control API."""

    async def record(session_id: str, form: Mapping[str, str]) -> None:
        session = await asyncio.to_thread(services.reader.session, session_id)
        await add_reward(_reward(form), session, services, Caller(admin=True))

    return record


def _reward(form: Mapping[str, str]) -> NewReward:
    """Return the reward in the form of a session's page.

    Raise :class:`ApiError` (422) if it is not valid.
    """
    given = {name: form[name] for name in ("name", "value", "turn") if name in form}
    note = form.get("note")
    try:
        new: NewReward = NewReward.model_validate_strings(given)
        if note:
            new = new.model_copy(update={"detail": {"note": note}})
        return new
    except ValidationError as error:
        first = error.errors()[0]
        message = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise ApiError("invalid_request", message, status=422) from error


def _cookie(key: str, until: int) -> str:
    return f"{until}.{hmac.digest(key.encode(), f'viewer {until}'.encode(), 'sha256').hex()}"


def _valid(cookie: str, key: str) -> bool:
    until = cookie.partition(".")[0]
    if not until.isascii() or not until.isdigit() or len(until) > 12:
        return False
    return int(until) > time.time() and same(cookie, _cookie(key, int(until)))
