"""``/v1/models`` and ``/v1beta/models``: what the engine serves, in the shape of whoever asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from proxy.canonical import ApiError, DialectName
from proxy.dialects import models as shapes
from proxy.dialects.models import Model


def models_reply(
    dialect: DialectName,
    cards: Sequence[Mapping[str, Any]],
    aliases: Mapping[str, str],
    wanted: str | None,
    headers: Mapping[str, str],
) -> bytes:
    """The engine's model ``cards`` and the ``aliases`` of them; one model when ``wanted``.

    Raises :class:`ApiError` (404) when ``wanted`` is none of them.
    """
    served = [_model(card["id"], card) for card in cards]
    by_name = {model.id: card for model, card in zip(served, cards, strict=True)}
    served += [_model(alias, by_name.get(name, {})) for alias, name in aliases.items()]
    as_list, as_one = _writers(dialect, headers)
    if wanted is None:
        return as_list(served)
    for model in served:
        if model.id == wanted:
            return as_one(model)
    raise ApiError("not_found", f"there is no model {wanted}", status=404, param="model")


def _writers(
    dialect: DialectName, headers: Mapping[str, str]
) -> tuple[Callable[[Sequence[Model]], bytes], Callable[[Model], bytes]]:
    if dialect == "google":
        return shapes.google_list, shapes.google_model
    if "anthropic-version" in headers:
        return shapes.anthropic_list, shapes.anthropic_model
    return shapes.openai_list, shapes.openai_model


def _model(name: str, card: Mapping[str, Any]) -> Model:
    return Model(name, int(card.get("created") or 0), card.get("max_model_len"))
