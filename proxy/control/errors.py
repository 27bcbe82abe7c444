"""The replies of the control API to its errors, in OpenAI's form."""

from __future__ import annotations

from typing import Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from bridle.proxy.dialects.errors import openai_error
from bridle.proxy.dialects.routes import nothing_at
from bridle.proxy.session.registry import store_not_read
from bridle.proxy.wire.canonical import ApiError
from bridle.store.errors import StoreUnavailable

_METHODS: Final = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")


def add_error_handlers(api: FastAPI) -> None:
    """Register a reply for each class of errors that a route or the framework raises."""
    api.add_exception_handler(ApiError, _api_error)
    api.add_exception_handler(RequestValidationError, _invalid)
    api.add_exception_handler(StoreUnavailable, _unreadable)
    api.add_exception_handler(HTTPException, _unrouted)


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)  # noqa: S101 - registered for nothing else
    reply = openai_error(error)
    return Response(reply.body, reply.status, dict(reply.headers), media_type="application/json")


async def _unreadable(_: Request, error: Exception) -> Response:
    assert isinstance(error, StoreUnavailable)  # noqa: S101 - registered for nothing else
    return await _api_error(_, store_not_read(error))


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101 - registered for nothing else
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        message = f"the body is not JSON: {first['ctx']['error']}"
        return await _api_error(_, ApiError("invalid_request", message, status=422))
    where = ".".join(str(part) for part in first["loc"][1:])
    return await _api_error(
        _, ApiError("invalid_request", first["msg"], status=422, param=where or None)
    )


async def _unrouted(request: Request, error: Exception) -> Response:
    """Return the reply to an error of the framework.

    The error is that there is no such route, or that it does not take the method.
    """
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for nothing else
    path = request.url.path
    if error.status_code == 404:
        return await _api_error(request, nothing_at(path))
    message = str(error.detail)
    headers = dict(error.headers or {})
    if error.status_code == 405:
        message = f"{request.method} is not served at {path}"
        headers = {"allow": ", ".join(_methods(request))}
    reply = await _api_error(
        request, ApiError("invalid_request", message, status=error.status_code)
    )
    reply.headers.update(headers)
    return reply


def _methods(request: Request) -> list[str]:
    """Return all methods of the path; the framework reports only those of its first route."""
    asked = [(method, {**request.scope, "method": method}) for method in _METHODS]
    return [
        method
        for method, scope in asked
        if any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)
    ]
