"""The models that are served: the choice of a request's engines, and the list for clients.

A request's engines follow from the model that it names and from the role of its caller.

Every request goes to the default policy, whatever its harness calls the model, unless the settings
send it elsewhere: to a further policy, to a frozen model, or to another provider. The calls of a
further policy are recorded with its name. Those of the frozen models and of providers carry the
note ``model_frozen``, which keeps them out of training.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from bridle.errors import UsageError
from bridle.proxy.dialects.dialect import Dialect, Model, ModelList, Native
from bridle.proxy.engines.pool import EnginePool, EngineState
from bridle.proxy.settings import OtherModel, ProxySettings
from bridle.proxy.wire.canonical import ApiError
from bridle.store.records import DEFAULT_POLICY, FROZEN, Note

SUBAGENT = "subagent"
"""The role of every caller that its harness names as a (sub-)agent of its own."""


class ModelRoutes:
    """The engines of the policies and of the other models. Start it inside the event loop."""

    def __init__(self, settings: ProxySettings, dialects: Iterable[Dialect] = ()) -> None:
        """Create the pools; no engine is asked yet.

        Raise :class:`bridle.errors.UsageError` for a model that names a dialect which is not among
        ``dialects`` or cannot be passed on.
        """
        natives = {one.name: one.native for one in dialects if one.native is not None}
        self.policies = {
            DEFAULT_POLICY: EnginePool(
                settings,
                settings.engine_urls,
                model=settings.model,
                api_key=settings.upstream_api_key,
                trained=True,
            ),
            **{
                name: EnginePool(
                    settings,
                    urls,
                    api_key=settings.upstream_api_key,
                    policy=name,
                    trained=True,
                )
                for name, urls in settings.policies.items()
            },
        }
        """The policies' engines by name, the default policy's first."""
        self._settings = settings
        self._default = self.policies[DEFAULT_POLICY]
        self._others = {
            name: _other(settings, name, other, natives)
            for name, other in settings.other_models.items()
        }
        self._spoken: frozenset[str] = frozenset().union(
            *(one.speaks for one in self._others.values())
        )
        self._by_name = {name: self.policies[name] for name in settings.policies} | self._others
        self._by_role = {
            role: self._named(name) or self._default for role, name in settings.role_models.items()
        }
        self.only = None if self._by_name else self._default
        """The engines of every call if there are none but the default policy's, else ``None``."""

    async def start(self) -> None:
        for pool in self.pools():
            await pool.start()

    async def close(self) -> None:
        for pool in self.pools():
            await pool.close()

    def pools(self) -> list[EnginePool]:
        return [*self.policies.values(), *self._others.values()]

    def external(self) -> dict[str, EnginePool]:
        """Return the pools of other providers' models, by name or pattern."""
        return {name: pool for name, pool in self._others.items() if pool.external}

    def speak(self, dialect: str) -> bool:
        """Return whether any model's engines get requests of this dialect as they are."""
        return dialect in self._spoken

    def states(self) -> list[EngineState]:
        return [state for pool in self.policies.values() for state in pool.states()]

    def find(self, model: str, role: str | None) -> EnginePool:
        """Return the engines for a role.

        If none are set, return those for the model's name, else those of the default policy.
        """
        to = None
        if role is not None:
            to = self._by_role.get(role) or self._by_role.get(SUBAGENT)
        return to or self._named(model) or self._default

    def _named(self, name: str) -> EnginePool | None:
        """Return the engines of the further policy or the other model of this name.

        The policy or model has this name, or its pattern matches it.
        """
        exact = self._by_name.get(name)
        if exact is not None:
            return exact
        for pattern, other in self._others.items():
            if fnmatchcase(name, pattern):
                return other
        return None

    def names(self) -> dict[str, str]:
        """Return the other names that a client may use, and the model that each stands for."""
        named = {
            name: other.model or name
            for name, other in self._settings.other_models.items()
            if not set("*?[") & set(name)
        }
        policies = {name: name for name in self._settings.policies}
        return {**policies, **named}


def _other(
    settings: ProxySettings, name: str, other: OtherModel, natives: Mapping[str, Native]
) -> EnginePool:
    kind = "external" if other.external else "frozen"
    pool = EnginePool(
        settings,
        other.urls,
        model=other.model,
        api_key=other.api_key,
        external=other.external,
        notes=(Note(FROZEN, f"{kind} {name}"),),
    )
    pool.speaks = _spoken(name, other, natives)
    return pool


def _spoken(name: str, other: OtherModel, natives: Mapping[str, Native]) -> frozenset[str]:
    """Return the dialects in which the model's API gets the clients' own requests."""
    if other.dialects is not None:
        for one in other.dialects:
            if one not in natives:
                known = ", ".join(natives) or "none"
                raise UsageError(f"other_models.{name}.dialects: {one} is none of {known}")
        return frozenset(other.dialects if other.external else ())
    if not other.external:
        return frozenset()
    return frozenset(
        dialect
        for dialect, native in natives.items()
        if all(native.addresses.search(url) for url in other.urls)
    )


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
