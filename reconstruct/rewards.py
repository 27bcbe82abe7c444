"""The one reader of rewards: from a session's rewards to the numbers of each place.

Training, evaluation, exports and pages all take their numbers from here, so that the same rewards
come to the same numbers everywhere. All values are float64.

Of several values with one name and place the latest counts. Only scores of the sources that a run
states count (:class:`CountedRewards`). A finding is never a number: its mode acts on the session
(:func:`findings_in`, :func:`quarantined`), whatever its name and value.

The session's number, without ``weights``: where the session as a whole has a reward named
``reward``, that one alone; else the sum of all rewards of the session. With ``weights``: their
weighted sum. Rewards of single calls are apart from this rule. Each call has the (weighted) sum of
all that it was given, which the estimators for steps read; ``turns`` adds them to the session's
number too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Final, Literal

from bridle.store.errors import NotFound
from bridle.store.reading.queries import Reader
from bridle.store.records import FindingMode, Reward, RewardSource, SessionRecord

Over = Literal["sum", "mean", "min", "max", "last"]
MAIN: Final = "reward"
"""The name that counts alone."""
VERIFIER_ALONE: Final = (RewardSource.VERIFIER.value,)
"""The sources that count where a run names none."""
ATTESTED: Final = (RewardSource.VERIFIER.value, RewardSource.OPERATOR.value)
"""The sources that count for a session of no run, which has no verifier to wait for; and those
whose findings act."""
_OVERS: Final[Mapping[str, Callable[[list[float]], float]]] = {
    "sum": math.fsum,
    "mean": fmean,
    "min": min,
    "max": max,
    "last": lambda values: values[-1],
}


def session_rewards(rewards: Iterable[Reward]) -> dict[str, float]:
    """The latest score of each name that was given to the session as a whole.

    Findings and rewards of single calls or turns are left out. No value is above 0 in a session
    that a finding zeroes.
    """
    given = list(rewards)
    limit = _limit(given)
    return {name: limit(value) for name, value in _whole(given).items()}


def turn_rewards(rewards: Iterable[Reward], name: str) -> dict[str, float]:
    """The latest score ``name`` of each call that has one, in the order of their first; no value is
    above 0 in a session that a finding zeroes."""
    given = list(rewards)
    limit = _limit(given)
    latest = _scores(one for one in given if one.name == name)
    return {one.call_id: limit(one.value) for one in latest if one.call_id is not None}


def call_scores(rewards: Iterable[Reward]) -> list[Reward]:
    """The latest score of each name and call or turn; no value is above 0 in a session that a
    finding zeroes."""
    given = list(rewards)
    limit = _limit(given)
    return [replace(one, value=limit(one.value)) for one in _scores(given) if not one.whole]


def findings_in(rewards: Iterable[Reward]) -> list[Reward]:
    """The findings that act: those that a verifier or the operator recorded."""
    return [one for one in rewards if one.is_finding and one.source in ATTESTED]


def quarantined(rewards: Iterable[Reward]) -> bool:
    """Whether a finding keeps the session out of training."""
    return any(one.mode is FindingMode.QUARANTINE for one in findings_in(rewards))


def zeroed(rewards: Iterable[Reward]) -> bool:
    """Whether a finding takes the session's rewards, which a quarantine does too: no number of the
    session is above 0."""
    return any(one.mode is not FindingMode.WARN for one in findings_in(rewards))


def without_findings(rewards: Iterable[Reward]) -> tuple[Reward, ...]:
    """The scores among ``rewards``."""
    return tuple(one for one in rewards if not one.is_finding)


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers that a session's rewards come to, each at its place."""

    value: float | None = None
    """The session's number: what it is compared by; ``None`` when it has none, or not all that the
    weights name."""
    own: float | None = None
    """The part of ``value`` that was given to the session as a whole."""
    calls: Mapping[str, float] = field(default_factory=dict)
    """By call id, what was given to the call itself. The call need not be one that is trained."""
    complete: bool = True
    """Whether every name is there that the weights name."""

    @property
    def episode(self) -> float | None:
        """The return of the whole episode: ``own`` and all ``calls``; ``None`` without either."""
        if not self.complete or (self.own is None and not self.calls):
            return None
        return math.fsum([self.own or 0.0, *self.calls.values()])


@dataclass(frozen=True, slots=True)
class Aggregation:
    """How the rewards of a session become numbers; a run keeps it in its ``config``."""

    weights: Mapping[str, float] | None = None
    """Names of rewards and their factors; other names do not count. A session must have every one,
    at the session or at a call. ``None``: the rule above, each with factor 1."""
    turns: Over | None = None
    """How each name's rewards of single calls become one value that is added to the session's
    number, for names that the session as a whole was not given. ``last`` is the one given last.
    ``None``: rewards of calls are no part of the session's number."""
    sources: tuple[str, ...] | None = None
    """Only rewards of these :class:`bridle.store.records.RewardSource` count. ``None``: those of
    the session's run (:class:`CountedRewards`), or the verifier's where no session is known."""

    def __post_init__(self) -> None:
        unknown = set(self.sources or ()) - {source.value for source in RewardSource}
        if unknown:
            known = ", ".join(source.value for source in RewardSource)
            named = ", ".join(sorted(unknown))
            raise ValueError(f"there is no source of rewards {named}, but {known}")
        if self.turns is not None and self.turns not in _OVERS:
            raise ValueError(f"turns must be one of {', '.join(_OVERS)}, not {self.turns!r}")

    def numbers(self, rewards: Iterable[Reward], call_ids: Sequence[str] = ()) -> Numbers:
        """The numbers of one session at each place.

        A reward that has the number of a turn but no call is that of ``call_ids[turn - 1]``; those
        that a store has read have their call already.
        """
        given = list(rewards)
        limit = _limit(given)
        counted = self.counted(given)
        named = _whole(counted)
        calls: dict[str, float] = {}
        by_name: dict[str, list[float]] = {}
        for one in _scores(_at_calls(counted, call_ids)):
            if one.whole or (self.weights is not None and one.name not in self.weights):
                continue
            by_name.setdefault(one.name, []).append(one.value)
            if one.call_id is not None:
                calls[one.call_id] = calls.get(one.call_id, 0.0) + self._factor(one) * one.value
        over = None if self.turns is None else _OVERS[self.turns]
        folded = {
            name: over(values)
            for name, values in by_name.items()
            if over is not None and name not in named
        }
        complete = set(self.weights or ()) <= named.keys() | by_name.keys()
        own = self._sum(self.chosen(named))
        value = self._sum({**folded, **self.chosen(named)})
        return Numbers(
            value=None if value is None or not complete else limit(value),
            own=None if own is None or not complete else limit(own),
            calls={call_id: limit(value) for call_id, value in calls.items()},
            complete=complete,
        )

    def value(self, rewards: Iterable[Reward]) -> float | None:
        """The session's one number; ``None`` without rewards, or when a name is missing."""
        return self.numbers(rewards).value

    def role(self, rewards: Iterable[Reward], name: str, factor: float | None) -> float | None:
        """The session's reward ``name`` as the number of one role; ``None`` where it has none.

        ``factor`` is used where there are weights that do not name the reward; ``None``: it then
        does not count.
        """
        given = list(rewards)
        named = _whole(self.counted(given))
        by = 1.0 if self.weights is None else self.weights.get(name, factor)
        if name not in named or by is None:
            return None
        return _limit(given)(by * named[name])

    def counted(self, rewards: Iterable[Reward]) -> list[Reward]:
        """The scores that count, of any name."""
        sources = VERIFIER_ALONE if self.sources is None else self.sources
        return [one for one in rewards if not one.is_finding and one.source in sources]

    def chosen(self, named: Mapping[str, float]) -> dict[str, float]:
        """Those of a session's rewards that make its number."""
        if self.weights is not None:
            return {name: named[name] for name in self.weights if name in named}
        return {MAIN: named[MAIN]} if MAIN in named else dict(named)

    def stated(self, rewards: Iterable[Reward]) -> str:
        """One line: which of the session's rewards make its number; empty for one without any."""
        named = _whole(self.counted(rewards))
        if not named:
            return ""
        chosen = self.chosen(named)
        beside = ", ".join(sorted(named.keys() - chosen.keys()))
        if self.weights is not None:
            terms = " + ".join(f"{factor:g} × {name}" for name, factor in self.weights.items())
            line = f"a session's reward is {terms}"
        elif MAIN in chosen:
            line = f"a session's reward is the one named {MAIN}"
        elif len(chosen) == 1:
            return f"a session's reward is {next(iter(chosen))}, the only one"
        else:
            names = ", ".join(sorted(chosen))
            line = f"a session's reward is the sum of {names}, since none is named {MAIN}"
        return f"{line}; recorded but not counted: {beside}" if beside else line

    def as_data(self) -> dict[str, Any]:
        """As JSON-ready data, equal for equal aggregations."""
        weights = None if self.weights is None else dict(sorted(self.weights.items()))
        sources = None if self.sources is None else sorted(self.sources)
        return {"weights": weights, "turns": self.turns, "sources": sources}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Aggregation:
        """The aggregation of :meth:`as_data`. Raises ``TypeError`` for unknown settings."""
        sources = data.get("sources")
        return cls(**{**data, "sources": None if sources is None else tuple(sources)})

    def _factor(self, reward: Reward) -> float:
        return 1.0 if self.weights is None else self.weights[reward.name]

    def _sum(self, named: Mapping[str, float]) -> float | None:
        if not named:
            return None
        if self.weights is None:
            return math.fsum(named.values())
        return math.fsum(self.weights[name] * value for name, value in named.items())


class CountedRewards:
    """The rewards that count, by what the session's run states in its configuration: the
    verifier's alone where it states no source, and the verifier's and the operator's for a session
    of no run."""

    def __init__(self, reader: Reader, sources: Sequence[str] | None = None) -> None:
        """``sources`` replace those that runs state."""
        self._reader = reader
        self._sources = None if sources is None else tuple(sources)
        self._stated: dict[str | None, Aggregation] = {}
        """By run."""

    def aggregation(self, run_id: str | None) -> Aggregation:
        """How the rewards of a run's sessions become numbers; ``None`` for sessions of no run."""
        if run_id not in self._stated:
            stated = self._read(run_id)
            default = ATTESTED if run_id is None else VERIFIER_ALONE
            sources = self._sources or stated.sources or default
            self._stated[run_id] = replace(stated, sources=sources)
        return self._stated[run_id]

    def number(self, run_id: str | None, rewards: Iterable[Reward]) -> float | None:
        """The number of a session of that run."""
        return self.aggregation(run_id).value(rewards)

    def sources(self, run_id: str | None) -> tuple[str, ...]:
        """The sources whose rewards count in a run."""
        return self.aggregation(run_id).sources or VERIFIER_ALONE

    def of(self, session: SessionRecord, rewards: Iterable[Reward]) -> list[Reward]:
        """Those of ``rewards``, which are the session's, that count, and the findings that act."""
        given = list(rewards)
        kept = [*self.aggregation(session.run_id).counted(given), *findings_in(given)]
        return sorted(kept, key=lambda one: one.created_at)

    def _read(self, run_id: str | None) -> Aggregation:
        if run_id is None:
            return Aggregation()
        try:
            config = self._reader.run(run_id).config
        except NotFound:
            return Aggregation()
        stated = config.get("reward") or {}
        known = ("weights", "turns", "sources")
        return Aggregation.from_data({name: stated[name] for name in known if name in stated})


class RewardNotice:
    """Reports which rewards make a session's number: once, and again where that changes."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._reported: set[str] = set()

    def __call__(self, aggregation: Aggregation, rewards: Iterable[Reward]) -> None:
        line = aggregation.stated(rewards)
        if line and line not in self._reported:
            self._reported.add(line)
            self._report(line)


def _limit(rewards: Iterable[Reward]) -> Callable[[float], float]:
    """What a finding lets a number of the session be."""
    return (lambda value: min(0.0, value)) if zeroed(rewards) else (lambda value: value)


def _scores(rewards: Iterable[Reward]) -> list[Reward]:
    """The latest score of each name and place, in the order in which they were given."""
    latest: dict[tuple[str, str | None, int | None], Reward] = {}
    for one in sorted(rewards, key=lambda reward: reward.created_at):
        if not one.is_finding:
            place = (one.name, one.call_id, None if one.call_id else one.turn)
            latest.pop(place, None)
            latest[place] = one
    return list(latest.values())


def _whole(rewards: Iterable[Reward]) -> dict[str, float]:
    return {one.name: one.value for one in _scores(one for one in rewards if one.whole)}


def _at_calls(rewards: Iterable[Reward], call_ids: Sequence[str]) -> list[Reward]:
    """``rewards``, with the call of each turn."""
    return [
        replace(one, call_id=call_ids[one.turn - 1])
        if one.call_id is None and one.turn is not None and 1 <= one.turn <= len(call_ids)
        else one
        for one in rewards
    ]
