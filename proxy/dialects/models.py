"""The list of models, as each provider writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import orjson

from bridle.proxy.wire.canonical import DialectName


@dataclass(frozen=True, slots=True)
class Model:
    """A model that clients may name."""

    id: str
    created: int
    """Seconds since the epoch."""
    context_length: int | None = None
    """Maximum tokens of prompt and reply together, if the engine reports it."""


def list_of(dialect: DialectName, models: Sequence[Model]) -> bytes:
    """Return the reply to a request for all models."""
    shown = [_SHAPES.get(dialect, _openai)(model) for model in models]
    if dialect == "google":
        return orjson.dumps({"models": shown})
    if dialect == "messages":
        ends = [models[0].id, models[-1].id] if models else [None, None]
        page = {"has_more": False, "first_id": ends[0], "last_id": ends[1]}
        return orjson.dumps({"data": shown, **page})
    return orjson.dumps({"object": "list", "data": shown})


def one(dialect: DialectName, model: Model) -> bytes:
    """Return the reply to a request for one model."""
    return orjson.dumps(_SHAPES.get(dialect, _openai)(model))


def _openai(model: Model) -> dict[str, Any]:
    """Return the model in OpenAI's shape, with the engines' own field ``max_model_len``."""
    shown: dict[str, Any] = {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "bridle",
    }
    if model.context_length is not None:
        shown["max_model_len"] = model.context_length
    return shown


def _anthropic(model: Model) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "type": "model",
        "id": model.id,
        "display_name": model.id,
        "created_at": datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    if model.context_length is not None:
        shown["max_input_tokens"] = model.context_length
    return shown


def _google(model: Model) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "name": f"models/{model.id}",
        "version": "1",
        "displayName": model.id,
        "supportedGenerationMethods": ["generateContent", "countTokens"],
    }
    if model.context_length is not None:
        shown["inputTokenLimit"] = model.context_length
        shown["outputTokenLimit"] = model.context_length
    return shown


_SHAPES: Final[Mapping[DialectName, Callable[[Model], dict[str, Any]]]] = {
    "messages": _anthropic,
    "google": _google,
}
