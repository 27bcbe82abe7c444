"""Which engines a request goes to, by the model that it names and by who asks.

Everything goes to the policy, whatever a harness calls its model, except what the settings send
elsewhere: to a frozen model, or to another provider. Such calls are recorded like any other and
carry the note ``model_frozen``, which keeps them out of training.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from bridle.proxy.engines.policy_gate import PolicyGate
from bridle.proxy.engines.pool import EnginePool
from bridle.proxy.settings import OtherModel, ProxySettings
from bridle.store.records import FROZEN, Note

SUBAGENT = "subagent"
"""The role of every caller that its harness names as a (sub-)agent of its own."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Where one call goes."""

    engines: EnginePool
    frozen: bool = False
    """It is not the policy: recorded, never trained, its ids continue nothing of ours."""
    external: bool = False
    """It knows no token ids: it is asked in plain terms of the provider's API."""
    notes: tuple[Note, ...] = ()


class ModelRoutes:
    """The policy's engines and those of the other models. Start it inside the event loop."""

    def __init__(self, settings: ProxySettings, gate: PolicyGate) -> None:
        self.policy = EnginePool(
            settings,
            gate,
            settings.engine_urls,
            model=settings.model,
            api_key=settings.upstream_api_key,
            trained=True,
        )
        self._settings = settings
        self._to_policy = Destination(self.policy)
        self._others = {
            name: _other(settings, name, other) for name, other in settings.other_models.items()
        }
        self.only = None if self._others else self._to_policy
        """Where every call goes, if there are no other models."""

    async def start(self) -> None:
        await self.policy.start()
        for other in self._others.values():
            await other.engines.start()

    async def close(self) -> None:
        await self.policy.close()
        for other in self._others.values():
            await other.engines.close()

    def find(self, model: str, role: str | None) -> Destination:
        """By role first, then by the model's name, then the policy."""
        asked = model
        if role is not None:
            roles = self._settings.role_models
            asked = roles.get(role) or roles.get(SUBAGENT) or model
        exact = self._others.get(asked)
        if exact is not None:
            return exact
        for pattern, other in self._others.items():
            if fnmatchcase(asked, pattern):
                return other
        return self._to_policy

    def names(self) -> dict[str, str]:
        """Other names that a client may use, with what each stands for."""
        named = {
            name: other.model or name
            for name, other in self._settings.other_models.items()
            if not set("*?[") & set(name)
        }
        return {**self._settings.model_aliases, **named}


def _other(settings: ProxySettings, name: str, other: OtherModel) -> Destination:
    pool = EnginePool(
        settings,
        PolicyGate(),
        other.urls,
        model=other.model,
        api_key=other.api_key,
        external=other.external,
    )
    kind = "external" if other.external else "frozen"
    return Destination(pool, True, other.external, (Note(FROZEN, f"{kind} {name}"),))
