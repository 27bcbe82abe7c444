"""A session's rewards by name, call and turn, and how a run adds them up.

Of several values with the same name and place the latest counts. Values are float64 throughout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final, Literal

from bridle.store.errors import NotFound
from bridle.store.reading.queries import Reader
from bridle.store.records import Reward, RewardSource, SessionRecord

Over = Literal["sum", "mean", "min", "max", "last"]
VERIFIER_ALONE: Final = (RewardSource.VERIFIER.value,)
"""The sources that count where a run names none."""
ATTESTED: Final = (RewardSource.VERIFIER.value, RewardSource.OPERATOR.value)
"""The sources that count for a session of no run, which has no verifier to wait for."""
_OVERS: Final[Mapping[str, Callable[[list[float]], float]]] = {
    "sum": math.fsum,
    "mean": fmean,
    "min": min,
    "max": max,
    "last": lambda values: values[-1],
}


def session_rewards(rewards: Iterable[Reward]) -> dict[str, float]:
    """The latest value of each name given to the session as a whole, float64.

    Rewards of single calls or turns are left out: how they add up is for a run to state.
    """
    whole = [r for r in rewards if r.call_id is None and r.turn is None]
    return {r.name: r.value for r in sorted(whole, key=lambda r: r.created_at)}


class CountedRewards:
    """The rewards that count: those of the sources that the session's run states in its
    configuration, the verifier's alone where it states none, and the verifier's and the operator's
    for a session of no run."""

    def __init__(self, reader: Reader, sources: Sequence[str] | None = None) -> None:
        """``sources`` replace what runs state."""
        self._reader = reader
        self._sources = None if sources is None else tuple(sources)
        self._stated: dict[str | None, tuple[str, ...]] = {None: ATTESTED}
        """By run."""

    def of(self, session: SessionRecord, rewards: Iterable[Reward]) -> list[Reward]:
        """Those of ``rewards``, which are the session's, that count."""
        sources = self.sources(session.run_id) if self._sources is None else self._sources
        return [reward for reward in rewards if reward.source in sources]

    def sources(self, run_id: str | None) -> tuple[str, ...]:
        """The sources that a run states."""
        if run_id not in self._stated and run_id is not None:
            try:
                config = self._reader.run(run_id).config
            except NotFound:
                config = {}
            stated = config.get("reward") or {}
            self._stated[run_id] = tuple(stated.get("sources") or VERIFIER_ALONE)
        return self._stated[run_id]


def turn_rewards(rewards: Iterable[Reward], name: str) -> dict[str, float]:
    """The latest value of ``name`` for each call that has one, in the order of their first."""
    own = [r for r in rewards if r.name == name and r.call_id is not None]
    latest = sorted(own, key=lambda r: r.created_at)
    return {r.call_id: r.value for r in latest if r.call_id is not None}


@dataclass(frozen=True, slots=True)
class Aggregation:
    """How the rewards of a session become one number; a run keeps it in its ``config``."""

    weights: Mapping[str, float] | None = None
    """Names of session rewards and their factors: a session must have every one. ``None``: all that
    the session has, each with factor 1."""
    turns: Over | None = None
    """How each name's rewards of single calls or turns become one value first, which counts where
    the session as a whole has no reward of that name. ``last`` is the one given last. ``None``:
    rewards of calls and turns do not count."""
    sources: tuple[str, ...] = VERIFIER_ALONE
    """Only rewards of these :class:`bridle.store.records.RewardSource` count."""

    def __post_init__(self) -> None:
        unknown = set(self.sources) - {source.value for source in RewardSource}
        if unknown:
            known = ", ".join(source.value for source in RewardSource)
            named = ", ".join(sorted(unknown))
            raise ValueError(f"there is no source of rewards {named}, but {known}")
        if self.turns is not None and self.turns not in _OVERS:
            raise ValueError(f"turns must be one of {', '.join(_OVERS)}, not {self.turns!r}")

    def value(self, rewards: Iterable[Reward]) -> float | None:
        """The session's one number; ``None`` without rewards, or when a name is missing."""
        rewards = [reward for reward in rewards if reward.source in self.sources]
        named = self._turn_values(rewards) | session_rewards(rewards)
        if self.weights is None:
            return math.fsum(named.values()) if named else None
        if any(name not in named for name in self.weights):
            return None
        return math.fsum(factor * named[name] for name, factor in self.weights.items())

    def as_data(self) -> dict[str, Any]:
        """As JSON-ready data, equal for equal aggregations."""
        weights = None if self.weights is None else dict(sorted(self.weights.items()))
        return {"weights": weights, "turns": self.turns, "sources": sorted(self.sources)}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Aggregation:
        """The aggregation of :meth:`as_data`. Raises ``TypeError`` for unknown settings."""
        sources = tuple(data.get("sources", VERIFIER_ALONE))
        return cls(**{**data, "sources": sources})

    def _turn_values(self, rewards: list[Reward]) -> dict[str, float]:
        if self.turns is None:
            return {}
        latest: dict[str, dict[tuple[str | None, int | None], float]] = {}
        for reward in sorted(rewards, key=lambda r: r.created_at):
            if reward.call_id is not None or reward.turn is not None:
                place = (reward.call_id, None if reward.call_id else reward.turn)
                values = latest.setdefault(reward.name, {})
                values.pop(place, None)
                values[place] = reward.value
        over = _OVERS[self.turns]
        return {name: over(list(values.values())) for name, values in latest.items()}
