"""The list of models, as each provider writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class Model:
    """A model that clients may name."""

    id: str
    created: int
    """Seconds since the epoch."""
    context_length: int | None = None
    """Tokens of prompt and reply together, when the engine reports it."""


def openai_list(models: Sequence[Model]) -> bytes:
    """``GET /v1/models``. ``max_model_len`` is the engines' own field."""
    return orjson.dumps({"object": "list", "data": [_openai(model) for model in models]})


def openai_model(model: Model) -> bytes:
    """``GET /v1/models/{id}``."""
    return orjson.dumps(_openai(model))


def anthropic_list(models: Sequence[Model]) -> bytes:
    """``GET /v1/models`` of a client that sends ``anthropic-version``."""
    return orjson.dumps(
        {
            "data": [_anthropic(model) for model in models],
            "has_more": False,
            "first_id": models[0].id if models else None,
            "last_id": models[-1].id if models else None,
        }
    )


def anthropic_model(model: Model) -> bytes:
    """``GET /v1/models/{id}`` of a client that sends ``anthropic-version``."""
    return orjson.dumps(_anthropic(model))


def google_list(models: Sequence[Model]) -> bytes:
    """``GET /v1beta/models``."""
    return orjson.dumps({"models": [_google(model) for model in models]})


def google_model(model: Model) -> bytes:
    """``GET /v1beta/models/{id}``."""
    return orjson.dumps(_google(model))


def _openai(model: Model) -> dict[str, Any]:
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
