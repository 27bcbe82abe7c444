"""What the chat and completions dialects share: decoding with named fields, errors, usage."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from proxy.canonical import ApiError, HttpError, Usage
from store.records import Note

T = TypeVar("T")

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PATH = re.compile(r"`\$\.?([^`]*)`$")
_MISSING = re.compile(r"missing required field `([^`]+)`")

ERROR_TYPES: Final[Mapping[str, str]] = {
    "invalid_request": "invalid_request_error",
    "context_overflow": "invalid_request_error",
    "too_large": "invalid_request_error",
    "not_found": "invalid_request_error",
    "authentication": "authentication_error",
    "permission": "permission_error",
    "rate_limit": "rate_limit_error",
    "budget": "insufficient_quota",
}
ERROR_CODES: Final[Mapping[str, str]] = {
    "authentication": "invalid_api_key",
    "context_overflow": "context_length_exceeded",
    "rate_limit": "rate_limit_exceeded",
    "budget": "insufficient_quota",
    "not_found": "not_found",
}


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """``body`` as the decoder's type. Raises :class:`ApiError` (400) naming the field."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid(str(error), _field(str(error))) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise invalid("the body is nested too deeply") from error


def other_fields(
    body: bytes, known: frozenset[str], forwarded: frozenset[str]
) -> tuple[dict[str, Any], tuple[Note, ...]]:
    """Fields of ``body`` beyond ``known``: those to forward with their values, and a note for
    each that is dropped although it says something."""
    extra: dict[str, Any] = {}
    notes: list[Note] = []
    for name, raw in _FIELDS.decode(body).items():
        if name in known:
            continue
        if bytes(raw) == b"null":
            continue
        if name in forwarded:
            extra[name] = msgspec.json.decode(raw)
        else:
            notes.append(Note("field_dropped", name))
    return extra, tuple(notes)


def invalid(message: str, param: str | None = None) -> ApiError:
    return ApiError("invalid_request", message, status=400, param=param)


def error(failure: ApiError) -> HttpError:
    """``failure`` in OpenAI's shape."""
    headers: tuple[tuple[str, str], ...] = ()
    if failure.retry_after is not None:
        headers = (("retry-after", str(math.ceil(failure.retry_after))),)
    return HttpError(failure.status, msgspec.json.encode({"error": error_object(failure)}), headers)


def error_object(failure: ApiError) -> dict[str, Any]:
    return {
        "message": failure.message,
        "type": ERROR_TYPES.get(failure.kind, "server_error"),
        "param": failure.param,
        "code": ERROR_CODES.get(failure.kind),
    }


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def _field(message: str) -> str | None:
    """The field that a msgspec message is about, as ``messages[0].content``."""
    path = _PATH.search(message)
    prefix = path.group(1) if path else ""
    missing = _MISSING.search(message)
    if missing:
        return f"{prefix}.{missing.group(1)}" if prefix else missing.group(1)
    return prefix or None
