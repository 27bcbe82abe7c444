"""The open sets of a run, and what is in them here."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any, Final

import msgspec

from bridle.errors import UsageError
from bridle.registry import Registry, options_of
from bridle.user_code import load_object

_SETS: Final = (
    "bridle.proxy.dialects.registry:DIALECTS",
    "bridle.reconstruct.exports.formats:EXPORTS",
    "bridle.harnesses.adapters:ADAPTERS",
    "bridle.run.agents:SANDBOXES",
    "bridle.run.agents:VERIFIERS",
    "bridle.harnesses.scorers:SCORERS",
    "bridle.run.fleets:FLEETS",
    "bridle.harnesses.tasks.sources:SCHEMES",
    "bridle.trainer.credit:ADVANTAGES",
    "bridle.trainer.credit.anchors:ANCHORS",
    "bridle.trainer.credit.privileged:CONTEXTS",
    "bridle.trainer.losses.losses:LOSSES",
    "bridle.trainer.losses.importance:CORRECTIONS",
    "bridle.trainer.losses.trust:TRUST_REGIONS",
    "bridle.trainer.filters:FILTERS",
    "bridle.trainer.sinks:SINKS",
    "bridle.trainer.learner.optimizer:OPTIMIZERS",
)


def open_sets() -> dict[str, Any]:
    """Return a description of each part, by its name, by the entry point group of its set.

    A description has the defaults of the part's own ``options``, and a line ``about`` it if it has
    one. A set or a part that cannot be loaded, because a package is missing, has an ``error``
    instead.
    """
    found: dict[str, Any] = {}
    for place in _SETS:
        try:
            parts: Registry[object] = load_object(place)
        except UsageError as error:
            found[place] = {"error": str(error)}
            continue
        found[parts.group] = {name: _described(parts, name) for name in parts.names()}
    return found


def _described(parts: Registry[object], name: str) -> dict[str, Any]:
    try:
        part = parts.get(name)
    except UsageError as error:
        return {"error": str(error)}
    text = inspect.getdoc(part) if isinstance(part, type) or inspect.isfunction(part) else None
    about = {} if not text else {"about": " ".join(text.split("\n\n")[0].split())}
    return {**about, "options": dict(_defaults(options_of(part)))}


def _defaults(kind: type[Any] | None) -> Iterator[tuple[str, Any]]:
    for field in () if kind is None else fields(kind):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if default is MISSING:
            yield field.name, None
        else:
            yield field.name, msgspec.to_builtins(default)
