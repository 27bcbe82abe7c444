"""Each kind of failure in each provider's shape.

Harnesses decide by a provider's words whether to retry, to compact the conversation or to stop, so
every kind of :class:`bridle.proxy.wire.canonical.ApiError` has words of its own. A context overflow
gets the provider's sentence; other messages are passed on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import orjson

from bridle.proxy.dialects import overflow
from bridle.proxy.wire.canonical import ApiError, HttpError

_INVALID: Final = "invalid_request_error"


class _Words(NamedTuple):
    """One kind of failure in the providers' words; Google's follow from the HTTP status."""

    openai: str = "server_error"
    code: str | None = "server_error"
    """The error code of OpenAI's API."""
    anthropic: str = "api_error"
    retry: bool = True
    """True if the same request can succeed later. The official SDKs and Claude Code obey the header
    that is made of it. Without that header, Claude Code repeats a refused key for minutes."""


_WORDS: Final[Mapping[str, _Words]] = {
    "invalid_request": _Words(_INVALID, None, _INVALID, retry=False),
    "authentication": _Words(_INVALID, "invalid_api_key", "authentication_error", retry=False),
    "permission": _Words(_INVALID, "permission_denied", "permission_error", retry=False),
    "not_found": _Words(_INVALID, "not_found", "not_found_error", retry=False),
    "too_large": _Words(_INVALID, "request_too_large", "request_too_large", retry=False),
    "context_overflow": _Words(_INVALID, "context_length_exceeded", _INVALID, retry=False),
    "rate_limit": _Words("rate_limit_error", "rate_limit_exceeded", "rate_limit_error"),
    "budget": _Words("insufficient_quota", "insufficient_quota", "rate_limit_error", retry=False),
    "overloaded": _Words("service_unavailable_error", "server_is_overloaded", "overloaded_error"),
    "upstream_unreachable": _Words(
        "service_unavailable_error", "upstream_unreachable", "overloaded_error"
    ),
    "upstream_timeout": _Words(code="upstream_timeout", anthropic="timeout_error"),
    "upstream_error": _Words(code="upstream_error"),
    "store_unavailable": _Words(code="store_unavailable"),
}
_OTHER: Final = _Words()
_OPENAI_NOT_FOUND: Final[Mapping[str | None, str]] = {
    "model": "model_not_found",
    "previous_response_id": "previous_response_not_found",
}
"""Clients that get these continue in another way: with another model, or with the whole
conversation."""
_GOOGLE: Final[Mapping[int, str]] = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}

_GOOGLE_RPC: Final = "type.googleapis.com/google.rpc"


def openai_error(error: ApiError) -> HttpError:
    return http_error(error, {"error": openai_error_object(error)})


def openai_error_object(error: ApiError) -> dict[str, Any]:
    words = _WORDS.get(error.kind, _OTHER)
    code, message = words.code, error.message
    if error.kind == "not_found":
        code = _OPENAI_NOT_FOUND.get(error.param, code)
    if error.kind == "context_overflow":
        message = overflow.openai(error)
    return {"message": message, "type": words.openai, "param": error.param, "code": code}


def midway(error: ApiError) -> ApiError:
    """Return ``error`` with words on which harnesses retry, for a stream that has begun.

    Its status has been sent, so harnesses go by the words. Pi and OpenCode retry a message that has
    "server error"; Qwen Code retries every error without a status. The others obey the codes. Codex
    ends at ``server_is_overloaded``, which it takes for a model at capacity.
    """
    if not _WORDS.get(error.kind, _OTHER).retry:
        return error
    message = f"{error.message} (server error within a reply; you can retry your request)"
    kind = "upstream_error" if error.kind == "overloaded" else error.kind
    return error.worded(message, error.param, kind)


def anthropic_stream_error(error: ApiError) -> dict[str, Any]:
    """Return the error event of a stream that has begun.

    Claude Code retries an event only if its type is ``overloaded_error``.
    """
    shown = anthropic_error_object(error)
    if _WORDS.get(error.kind, _OTHER).retry:
        shown["error"]["type"] = _WORDS["overloaded"].anthropic
    return shown


def anthropic_error(error: ApiError) -> HttpError:
    return http_error(error, anthropic_error_object(error))


def anthropic_error_object(error: ApiError) -> dict[str, Any]:
    kind, message = _WORDS.get(error.kind, _OTHER).anthropic, error.message
    if error.kind == "context_overflow":
        message = overflow.anthropic(error)
    shown: dict[str, Any] = {"type": kind, "message": message}
    if error.details:
        shown["details"] = dict(error.details)
    return {"type": "error", "error": shown}


def google_error(error: ApiError) -> HttpError:
    return http_error(error, google_error_object(error))


def google_error_object(error: ApiError) -> dict[str, Any]:
    message = error.message
    if error.kind == "context_overflow":
        message = overflow.google(error)
    status = _GOOGLE.get(error.status, "INVALID_ARGUMENT" if error.status < 500 else "INTERNAL")
    if error.kind == "authentication":
        status = "UNAUTHENTICATED"
    shown: dict[str, Any] = {"code": error.status, "message": message, "status": status}
    details: list[dict[str, Any]] = []
    if error.kind == "budget":
        violation = {"quotaId": "SessionBudgetPerDay", "description": error.message}
        details.append({"@type": f"{_GOOGLE_RPC}.QuotaFailure", "violations": [violation]})
    if error.retry_after is not None:
        delay = f"{error.retry_after:g}s"
        details.append({"@type": f"{_GOOGLE_RPC}.RetryInfo", "retryDelay": delay})
    if details:
        shown["details"] = details
    return {"error": shown}


def http_error(error: ApiError, body: dict[str, Any]) -> HttpError:
    """Return ``error`` as HTTP with the JSON ``body``.

    Add the headers that clients obey on whether and when to send the request again.
    """
    headers = [("content-type", "application/json")]
    if error.retry_after is not None:
        headers.append(("retry-after", str(math.ceil(error.retry_after))))
    if not _WORDS.get(error.kind, _OTHER).retry:
        headers.append(("x-should-retry", "false"))
    return HttpError(error.status, orjson.dumps(body), tuple(headers))
