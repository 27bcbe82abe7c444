"""What the chat and completions dialects share: decoding with named fields, and usage."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, TypeVar

import msgspec

from bridle.proxy.wire.canonical import ApiError, Usage
from bridle.store.records import Note

T = TypeVar("T")

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PATH = re.compile(r"`\$\.?([^`]*)`$")
_MISSING = re.compile(r"missing required field `([^`]+)`")


Count = Annotated[int, msgspec.Meta(ge=1, le=128)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""What JSON writers of every engine's client can carry."""


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


FORWARDED: Final = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "ignore_eos",
        "logit_bias",
        "min_tokens",
        "mm_processor_kwargs",
        "reasoning_effort",
        "stop_token_ids",
        "structured_outputs",
        "thinking_token_budget",
        "truncate_prompt_tokens",
        "user",
    }
)
"""Fields that engines know and that change nothing about what can be recorded."""


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
    each that is dropped although it says something. Raises :class:`ApiError` (400)."""
    extra: dict[str, Any] = {}
    notes: list[Note] = []
    for name, raw in _FIELDS.decode(body).items():
        if name in known:
            continue
        if bytes(raw) == b"null":
            continue
        if name in forwarded:
            extra[name] = _value(raw, name)
        else:
            notes.append(Note("field_dropped", name))
    return extra, tuple(notes)


def _value(raw: msgspec.Raw, name: str) -> Any:
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError as error:  # a number that is too long to be read
        raise invalid(str(error), name) from error


def invalid(message: str, param: str | None = None) -> ApiError:
    return ApiError("invalid_request", message, status=400, param=param)


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
