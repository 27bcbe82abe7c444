"""The list of models in the shape of whoever asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson


def models_reply(
    cards: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    wanted: str | None,
    headers: Mapping[str, str],
) -> bytes:
    """``names`` as OpenAI lists models, or as Anthropic does; one of them when ``wanted``."""
    by_name = {card["id"]: card for card in cards}
    if "anthropic-version" in headers:
        shown = [_anthropic(name) for name in names]
        whole: dict[str, Any] = {
            "data": shown,
            "has_more": False,
            "first_id": names[0] if names else None,
            "last_id": names[-1] if names else None,
        }
    else:
        shown = [_openai(name, by_name.get(name, {})) for name in names]
        whole = {"object": "list", "data": shown}
    if wanted is not None:
        return orjson.dumps(next(model for model in shown if model["id"] == wanted))
    return orjson.dumps(whole)


def _openai(name: str, card: Mapping[str, Any]) -> dict[str, Any]:
    model = {
        "id": name,
        "object": "model",
        "created": card.get("created", 0),
        "owned_by": card.get("owned_by", "bridle"),
    }
    if "max_model_len" in card:
        model["max_model_len"] = card["max_model_len"]
    return model


def _anthropic(name: str) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }
