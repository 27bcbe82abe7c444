"""The failure of an upstream, however it shows, in provider-neutral terms.

Upstreams refuse with a status, or with 200 and an error in the body, in the first event of a stream
or in a later one. The object is ``{"error": {…}}``, ``{"error": "…"}``, ``{"object": "error", …}``,
``{"detail": …}``, ``{"base_resp": {…}}`` or a list of one of these. Its class comes from its code,
type and numbers first, then from its status, and from its sentence only where these are silent
(``proxy/dialects/overflow.py``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from bridle.proxy.dialects import overflow
from bridle.proxy.engines.transport import ConnectionBroke, ConnectionFailed, EngineResponse
from bridle.proxy.wire.canonical import ApiError, Overflow

CONNECTION_ERRORS: Final = (ConnectionFailed, ConnectionBroke, TimeoutError, OSError)
REMOVED: Final = b"[a key of the proxy]"

_SERVER_ERRORS: Final = frozenset(status for status in HTTPStatus if status >= 500)
_REFUSED: Final = (400, 413, 422)
_STATUS_OF: Final[tuple[tuple[str, int], ...]] = (
    ("invalid_request", 400),
    ("invalidrequest", 400),
    ("badrequest", 400),
    ("invalid_argument", 400),
    ("validation", 422),
    ("unprocessable", 422),
    ("not_found", 404),
    ("notfound", 404),
    ("rate_limit", 429),
    ("ratelimit", 429),
    ("resource_exhausted", 429),
    ("quota", 429),
    ("authentication", 401),
    ("permission", 403),
    ("overload", 503),
    ("unavailable", 503),
)
"""The parts of an error's type or code, each with the HTTP status that it stands for."""
_LONGEST: Final = 4000
"""Maximum characters of a message that are passed on."""
_MINIMAX: Final = {1002: 429, 1004: 401, 2013: 400}
"""The HTTP statuses of the numbers in MiniMax's ``base_resp``."""


@dataclass(frozen=True, slots=True)
class UpstreamError:
    """A parsed error object."""

    message: str
    code: Any = None
    kind: str = ""
    """Its type and code as one text in lower case."""
    param: str | None = None
    overflow: Overflow | None = None

    @property
    def status(self) -> int | None:
        """The HTTP status that the object itself names or means."""
        code = self.code
        if isinstance(code, str) and code.isdecimal() and len(code) == 3:
            code = int(code)
        if isinstance(code, int) and not isinstance(code, bool) and 400 <= code < 600:
            return code
        return next((status for part, status in _STATUS_OF if part in self.kind), None)

    def overflows(self, status: int | None) -> bool:
        """Return True if the error, answered with ``status``, is a context overflow."""
        if self.overflow is not None or any(word in overflow.CODES for word in self.kind.split()):
            return True
        if status in (401, 403, 404, 429):
            return False
        return overflow.is_overflow(self.message, refusal=status in _REFUSED)


def error_in(given: Any) -> UpstreamError | None:
    """Return the error that a body or an event reports, or ``None`` if it reports none."""
    if isinstance(given, list) and len(given) == 1:
        (given,) = given
    if not isinstance(given, Mapping):
        return None
    error = given.get("error")
    if isinstance(error, Mapping) and error:
        return _read(error)
    if isinstance(error, str) and error:
        kind = given.get("error_type") or given.get("type")
        return _read({"message": error, "type": kind, "code": given.get("code")})
    if given.get("choices"):
        return None
    if given.get("object") == "error" or isinstance(given.get("message"), str):
        return _read(given)
    for name in ("detail", "errors"):
        if given.get(name):
            return _read({"message": _text(given[name]), "code": given.get("status")})
    base = given.get("base_resp")
    if isinstance(base, Mapping) and (number := base.get("status_code")):
        code = _MINIMAX.get(number, number) if isinstance(number, int) else number
        return _read({"message": base.get("status_msg"), "code": code})
    return None


def reported(given: Any) -> ApiError:
    """Return the error for an error object inside a reply that was accepted with status 200."""
    error = error_in(given) or error_in({"error": given}) or UpstreamError("no message")
    status = error.status
    if error.overflows(status):
        return _overflow(error)
    message = f"the engine failed: {error.message}"
    if status in (*_REFUSED, 404, 429, 503):
        return classified(UpstreamError(message, error.code, error.kind, error.param), status)
    return ApiError("upstream_error", message, status=502)


def refused(body: bytes, status: int, retry_after: float | None = None) -> ApiError:
    """Return the error of a response with the ``status`` of a failure."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        given = None
    error = error_in(given)
    if error is None:
        error = UpstreamError(_unread(given, body, status))
    return classified(error, status, retry_after)


def classified(error: UpstreamError, status: int, retry_after: float | None = None) -> ApiError:
    """Classify ``error`` by its code, type and numbers, then by ``status``."""
    message, param = error.message, error.param
    if error.overflows(status):
        return _overflow(error)
    if status in _REFUSED:
        return ApiError("invalid_request", message, status=400, param=param)
    if status == 404:
        return ApiError("not_found", message, status=404, param=param)
    if status == 429:
        return ApiError("rate_limit", message, status=429, retry_after=retry_after)
    if status == 503:
        return ApiError("overloaded", message, status=503, retry_after=retry_after)
    if status in (401, 403):
        message = "the engine refused the proxy's own key"
    known = status if status in _SERVER_ERRORS else 502 if status > 500 else 500
    return ApiError("upstream_error", message, status=known, retry_after=retry_after)


def _overflow(error: UpstreamError) -> ApiError:
    return ApiError(
        "context_overflow", error.message, status=400, param=error.param, overflow=error.overflow
    )


def _read(error: Mapping[str, Any]) -> UpstreamError:
    message = _text(error.get("message") or error.get("detail") or error.get("error"))
    metadata = error.get("metadata")
    if isinstance(metadata, Mapping) and isinstance(metadata.get("raw"), str):
        # An aggregator's own sentence says nothing; the provider's stands beside it.
        message = f"{message}: {metadata['raw']}" if message else metadata["raw"]
    code, param = error.get("code"), error.get("param")
    words = (error.get("type"), code, error.get("status"))
    numbers = Overflow(
        prompt=_count(error.get("n_prompt_tokens")), limit=_count(error.get("n_ctx"))
    )
    return UpstreamError(
        (message or "the engine gave no reason")[:_LONGEST],
        code if code is not None else error.get("status"),
        " ".join(word.lower() for word in words if isinstance(word, str)),
        param if isinstance(param, str) else None,
        numbers if numbers != Overflow() else None,
    )


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _text(value: Any) -> str:
    """Return the text of an error; FastAPI gives a list of objects with ``msg``."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "; ".join(filter(None, map(_text, value[:8])))
    if isinstance(value, Mapping):
        for name in ("message", "msg", "detail", "error"):
            if value.get(name):
                return _text(value[name])
    return "" if value is None or isinstance(value, Mapping) else str(value)[:_LONGEST]


def _unread(given: Any, body: bytes, status: int) -> str:
    """Return the reason in a body that is no error object.

    A plain text is the reason; a page of markup is not.
    """
    if isinstance(given, Mapping):
        return "the engine gave no reason"
    text = given if isinstance(given, str) else body[:_LONGEST].decode(errors="replace").strip()
    if given is None and text and not text.startswith(("<", "{", "[")) and status in _REFUSED:
        return text
    if isinstance(given, str) and given:
        return given
    return "the engine refused the request without a readable reason"


def connection_error(error: Exception) -> ApiError:
    """Return the error for a failed connection, in neutral terms.

    The engine's address is left out.
    """
    if isinstance(error, TimeoutError):
        return ApiError("upstream_timeout", "the engine did not answer in time", status=504)
    if isinstance(error, ConnectionFailed):
        return ApiError("upstream_unreachable", "the engine cannot be reached", status=502)
    return ApiError("upstream_error", "the engine's connection broke in the reply", status=502)


def without_keys(body: bytes, keys: Iterable[bytes]) -> bytes:
    """Remove the proxy's own ``keys`` from a body that an engine sent.

    Some engines quote in a refusal the key that they were sent.
    """
    for key in keys:
        body = body.replace(key, REMOVED)
    return body


async def refusal(response: EngineResponse, keys: Iterable[bytes]) -> ApiError:
    """Return the engine's error response as an :class:`ApiError`.

    The proxy's own ``keys`` are left out.
    """
    try:
        body = without_keys(await response.read(), keys)
    except CONNECTION_ERRORS as error:
        return connection_error(error)
    status = response.status
    if 300 <= status < 400:
        message = "the engine redirects: the proxy must be given the address that it leads to"
        return ApiError("upstream_error", message, status=500)
    return refused(body, status, seconds(response.headers.get("retry-after")))


def seconds(retry_after: str | None) -> float | None:
    """Return the seconds to wait.

    Return ``None`` for a date and for a value that is no duration: ``inf`` and ``nan`` are floats,
    too.
    """
    try:
        seconds = float(retry_after or "nan")
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None
