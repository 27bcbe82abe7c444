"""What each kind of failure is called by each provider.

Harnesses decide by these words whether to retry, to compact the conversation or to stop, so every
kind of :class:`bridle.proxy.wire.canonical.ApiError` has its own. Context overflow is said in the
provider's sentence; other messages are passed on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import orjson

from bridle.proxy.dialects import overflow
from bridle.proxy.wire.canonical import ApiError, HttpError

_NO_RETRY: Final = frozenset(
    {"invalid_request", "authentication", "permission", "not_found", "too_large"}
    | {"context_overflow", "budget"}
)
"""Failures that the same request meets again. The official SDKs and Claude Code heed the header;
without it Claude Code repeats a refused key for minutes."""

_OPENAI: Final[Mapping[str, tuple[str, str | None]]] = {
    "invalid_request": ("invalid_request_error", None),
    "authentication": ("invalid_request_error", "invalid_api_key"),
    "permission": ("invalid_request_error", "permission_denied"),
    "not_found": ("invalid_request_error", "not_found"),
    "too_large": ("invalid_request_error", "request_too_large"),
    "context_overflow": ("invalid_request_error", "context_length_exceeded"),
    "rate_limit": ("rate_limit_error", "rate_limit_exceeded"),
    "budget": ("insufficient_quota", "insufficient_quota"),
    "overloaded": ("service_unavailable_error", "server_is_overloaded"),
    "upstream_unreachable": ("server_error", "upstream_unreachable"),
    "upstream_timeout": ("server_error", "upstream_timeout"),
    "upstream_error": ("server_error", "upstream_error"),
    "store_unavailable": ("server_error", "store_unavailable"),
    "internal": ("server_error", "server_error"),
}
_OPENAI_NOT_FOUND: Final[Mapping[str | None, str]] = {
    "model": "model_not_found",
    "previous_response_id": "previous_response_not_found",
}
"""Clients that meet these go on in another way: another model, the whole conversation."""
_ANTHROPIC: Final[Mapping[str, str]] = {
    "invalid_request": "invalid_request_error",
    "authentication": "authentication_error",
    "permission": "permission_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "context_overflow": "invalid_request_error",
    "rate_limit": "rate_limit_error",
    "budget": "rate_limit_error",
    "overloaded": "overloaded_error",
    "upstream_timeout": "timeout_error",
}
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
    return _http(error, {"error": openai_error_object(error)})


def openai_error_object(error: ApiError) -> dict[str, Any]:
    kind, code = _OPENAI.get(error.kind, ("server_error", "server_error"))
    if error.kind == "not_found":
        code = _OPENAI_NOT_FOUND.get(error.param, code)
    message = error.message
    if error.kind == "context_overflow":
        message = _openai_overflow(error.message)
    return {"message": message, "type": kind, "param": error.param, "code": code}


def anthropic_error(error: ApiError) -> HttpError:
    return _http(error, anthropic_error_object(error))


def anthropic_error_object(error: ApiError) -> dict[str, Any]:
    kind = _ANTHROPIC.get(error.kind, "api_error")
    message = error.message
    if error.kind == "context_overflow":
        message = _anthropic_overflow(error.message)
    return {"type": "error", "error": {"type": kind, "message": message}}


def google_error(error: ApiError) -> HttpError:
    return _http(error, google_error_object(error))


def google_error_object(error: ApiError) -> dict[str, Any]:
    message = error.message
    if error.kind == "context_overflow":
        message = _google_overflow(error.message)
    otherwise = "INVALID_ARGUMENT" if error.status < 500 else "INTERNAL"
    shown: dict[str, Any] = {
        "code": error.status,
        "message": message,
        "status": _GOOGLE.get(error.status, otherwise),
    }
    if error.kind == "authentication":
        shown["status"] = "UNAUTHENTICATED"
    details: list[dict[str, Any]] = []
    if error.kind == "budget":
        violation = {"quotaId": "SessionBudgetPerDay", "description": error.message}
        details.append({"@type": f"{_GOOGLE_RPC}.QuotaFailure", "violations": [violation]})
    if error.retry_after is not None:
        details.append(
            {
                "@type": f"{_GOOGLE_RPC}.RetryInfo",
                "retryDelay": f"{error.retry_after:g}s",
            }
        )
    if details:
        shown["details"] = details
    return {"error": shown}


def _http(error: ApiError, body: dict[str, Any]) -> HttpError:
    headers = [("content-type", "application/json")]
    if error.retry_after is not None:
        headers.append(("retry-after", str(math.ceil(error.retry_after))))
    if error.kind in _NO_RETRY:
        headers.append(("x-should-retry", "false"))
    return HttpError(error.status, orjson.dumps(body), tuple(headers))


def _openai_overflow(message: str) -> str:
    found = overflow.read(message)
    if found.limit is None:
        return f"Your input exceeds the context window of this model. {message}"
    told = f"This model's maximum context length is {found.limit} tokens. However, "
    if found.prompt is None:
        return told + "your input and the requested output are longer. Please reduce their length."
    if found.output is not None and found.prompt <= found.limit:
        return told + (
            f"you requested {found.prompt + found.output} tokens ({found.prompt} in the messages, "
            f"{found.output} in the completion). Please reduce the length of the messages or "
            "completion."
        )
    return told + (
        f"your messages resulted in {found.prompt} tokens. "
        "Please reduce the length of the messages."
    )


def _anthropic_overflow(message: str) -> str:
    found = overflow.read(message)
    if found.prompt is None or found.limit is None:
        return f"prompt is too long: {message}"
    if found.output is not None and found.prompt <= found.limit:
        return (
            f"input length and `max_tokens` exceed context limit: {found.prompt} + "
            f"{found.output} > {found.limit}, decrease input length or `max_tokens` and try again"
        )
    return f"prompt is too long: {found.prompt} tokens > {found.limit} maximum"


def _google_overflow(message: str) -> str:
    found = overflow.read(message)
    if found.prompt is None or found.limit is None:
        return f"The input token count exceeds the maximum number of tokens allowed. {message}"
    used = found.prompt + (found.output or 0) if found.prompt <= found.limit else found.prompt
    return (
        f"The input token count ({used}) exceeds the maximum number of tokens allowed "
        f"({found.limit})."
    )
