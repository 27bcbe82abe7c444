"""The engine's models in the shape of each provider."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bridle.proxy.dialects.dialect import Model, ModelList
from bridle.proxy.wire.canonical import ApiError


def models_reply(
    shapes: ModelList,
    cards: Sequence[Mapping[str, Any]],
    aliases: Mapping[str, str],
    wanted: str | None,
) -> bytes:
    """Return the engine's model ``cards`` and the ``aliases`` of them.

    Return only the model ``wanted`` if it is given.

    Raises :class:`ApiError` (404) if ``wanted`` is none of them.
    """
    served = [_model(card["id"], card) for card in cards]
    by_name = {model.id: card for model, card in zip(served, cards, strict=True)}
    served += [_model(alias, by_name.get(name, {})) for alias, name in aliases.items()]
    if wanted is None:
        return shapes.all(served)
    for model in served:
        if model.id == wanted:
            return shapes.one(model)
    raise ApiError("not_found", f"there is no model {wanted}", status=404, param="model")


def _model(name: str, card: Mapping[str, Any]) -> Model:
    return Model(name, int(card.get("created") or 0), card.get("max_model_len"))
