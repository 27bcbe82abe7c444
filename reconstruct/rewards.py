"""Rules that turn a session's rewards into numbers for the session and for its parts.

Training, evaluation, exports and pages all take their numbers from here, so that the same rewards
give the same numbers everywhere. All values are float64.

Of several values with one name and place, the latest counts. Only scores of the sources that a run
states count (:class:`CountedRewards`); a scorer's also count where the weights name them. A success
is a number for evaluations alone. A finding is never a number: its mode acts on the session
(:func:`findings_in`, :func:`quarantined`), whatever its name and value.

Without ``weights``, the session's number is the reward named ``reward`` if the session as a whole
has one, else the sum of all rewards of the session. With ``weights``, it is their weighted sum.
Rewards of parts of the session are separate from this rule: each call, branch and role has the
(weighted) sum of its own rewards, which the estimators for steps and roles read. A branch's reward
is one of the call that ends it. ``turns`` also adds the parts' rewards to the session's number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Final, Literal

from bridle.store.errors import NotFound
from bridle.store.reading.queries import Reader
from bridle.store.records import SessionRecord
from bridle.store.reward import FindingMode, Reward, RewardKind, RewardSource

Over = Literal["sum", "mean", "min", "max", "last"]
MAIN: Final = "reward"
"""The name of the reward that alone is the session's number where it is given."""
VERIFIER_ALONE: Final = (RewardSource.VERIFIER.value,)
"""The sources that count if a run states none."""
EVERYBODY: Final = (RewardSource.VERIFIER.value, RewardSource.OPERATOR.value)
"""The sources that count for a session of no run, which has no verifier to wait for."""
_OVERS: Final[Mapping[str, Callable[[list[float]], float]]] = {
    "sum": math.fsum,
    "mean": fmean,
    "min": min,
    "max": max,
    "last": lambda values: values[-1],
}


def session_rewards(rewards: Iterable[Reward]) -> dict[str, float]:
    """Return the latest score of each name that was given to the session as a whole.

    Findings, successes and rewards of parts are left out. No value is above 0 in a session
    that a finding zeroes.
    """
    given = list(rewards)
    limit = _limit(given)
    return {name: limit(value) for name, value in _whole(given).items()}


def turn_rewards(rewards: Iterable[Reward], name: str) -> dict[str, float]:
    """Return the latest score ``name`` of each call that has one, itself or for its branch.

    The scores are in the order in which they were given. No value is above 0 in a session that a
    finding zeroes.
    """
    given = list(rewards)
    limit = _limit(given)
    latest = _scores(one for one in given if one.name == name)
    return {at: limit(one.value) for one in latest if (at := _call_of(one)) is not None}


def role_rewards(rewards: Iterable[Reward]) -> dict[str, dict[str, float]]:
    """Return the latest score of each name that was given to a role, by role.

    No value is above 0 in a session that a finding zeroes.
    """
    found: dict[str, dict[str, float]] = {}
    for one in part_scores(rewards):
        if one.role is not None:
            found.setdefault(one.role, {})[one.name] = one.value
    return found


def part_scores(rewards: Iterable[Reward]) -> list[Reward]:
    """Return the latest score of each name and part of the session.

    No value is above 0 in a session that a finding zeroes.
    """
    given = list(rewards)
    limit = _limit(given)
    return [replace(one, value=limit(one.value)) for one in _scores(given) if not one.whole]


def findings_in(rewards: Iterable[Reward]) -> list[Reward]:
    return [one for one in rewards if one.is_finding]


def quarantined(rewards: Iterable[Reward]) -> bool:
    """Return whether a finding keeps the session out of training."""
    return any(one.mode is FindingMode.QUARANTINE for one in findings_in(rewards))


def zeroed(rewards: Iterable[Reward]) -> bool:
    """Return whether a finding zeroes the session, so that none of its numbers is above 0.

    A quarantine does so too.
    """
    return any(one.mode is not FindingMode.WARN for one in findings_in(rewards))


def without_findings(rewards: Iterable[Reward]) -> tuple[Reward, ...]:
    """Return the scores and successes among ``rewards``, without the findings."""
    return tuple(one for one in rewards if not one.is_finding)


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers that a session's rewards give, for the session and for its parts."""

    value: float | None = None
    """The session's number, by which it is compared. ``None`` if it has no reward, or not all that
    the weights name."""
    own: float | None = None
    """The part of ``value`` that was given to the session as a whole."""
    calls: Mapping[str, float] = field(default_factory=dict)
    """The sum of the rewards of each call, by call id, with those of the branch that it ends. The
    call need not be one that is trained."""
    roles: Mapping[str, float] = field(default_factory=dict)
    """The sum of the rewards that were given to each role."""
    complete: bool = True
    """True if there is a reward for every name in the weights."""
    unplaced: tuple[str, ...] = ()
    """Names of the rewards of turns that the session does not have. They are in no other number."""

    @property
    def parts_alone(self) -> bool:
        """Return whether there are numbers of calls or roles, and none of the session."""
        return self.value is None and bool(self.calls or self.roles)

    @property
    def episode(self) -> float | None:
        """The return of the whole episode: the sum of ``own`` and all ``calls`` and ``roles``.

        ``None`` if there is none of them, or if a name in the weights is missing.
        """
        if not self.complete or (self.own is None and not self.calls and not self.roles):
            return None
        return math.fsum([self.own or 0.0, *self.calls.values(), *self.roles.values()])


@dataclass(frozen=True, slots=True)
class Aggregation:
    """The rules by which a session's rewards become numbers. A run keeps them in its ``config``."""

    weights: Mapping[str, float] | None = None
    """The factor of each reward name; other names do not count. A session must have every one, at
    the session or at a part of it. If ``None``, the rule without weights applies (see the module's
    description), each reward with factor 1."""
    turns: Over | None = None
    """The function that folds each name's rewards of parts into one value, for names that the
    session as a whole was not given. The value is added to the session's number. ``last`` is the
    reward given last. If ``None``, rewards of parts do not count in the session's number."""
    sources: tuple[str, ...] | None = None
    """The :class:`bridle.store.records.RewardSource` values whose rewards count. If ``None``, those
    of the session's run count (:class:`CountedRewards`), or the verifier's where no session is
    known."""

    def __post_init__(self) -> None:
        unknown = set(self.sources or ()) - {source.value for source in RewardSource}
        if unknown:
            known = ", ".join(source.value for source in RewardSource)
            named = ", ".join(sorted(unknown))
            raise ValueError(f"there is no source of rewards {named}, but {known}")
        if self.turns is not None and self.turns not in _OVERS:
            raise ValueError(f"turns must be one of {', '.join(_OVERS)}, not {self.turns!r}")

    def numbers(self, rewards: Iterable[Reward]) -> Numbers:
        """Return the numbers of one session and its parts.

        A reward that was given by the number of a turn has its call from the store's reader
        (``store/reading/reward_rows.py``); one without a call is named in ``unplaced``.
        """
        given = list(rewards)
        limit = _limit(given)
        counted = self.counted(given)
        named = _whole(counted)
        parts = [
            one
            for one in _scores(counted)
            if not one.whole and (self.weights is None or one.name in self.weights)
        ]
        placed = [one for one in parts if one.role is not None or _call_of(one) is not None]
        by_name: dict[str, list[float]] = {}
        for one in placed:
            by_name.setdefault(one.name, []).append(one.value)
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
            calls=self._totals(limit, ((_call_of(one), one) for one in placed)),
            roles=self._totals(limit, ((one.role, one) for one in placed)),
            complete=complete,
            unplaced=tuple(one.name for one in parts if one not in placed),
        )

    def success(self, rewards: Iterable[Reward]) -> float | None:
        """Return the value by which an evaluation judges the session as passed.

        It is the latest success of the session as a whole, else the session's number. It is not
        above 0 in a session that a finding zeroes.
        """
        given = list(rewards)
        judged = [
            one
            for one in sorted(given, key=lambda reward: reward.created_at)
            if one.kind is RewardKind.SUCCESS and one.whole and self._counts(one)
        ]
        return _limit(given)(judged[-1].value) if judged else self.value(given)

    def value(self, rewards: Iterable[Reward]) -> float | None:
        """Return the session's number, or ``None`` if it has no rewards or a name is missing."""
        return self.numbers(rewards).value

    def role(
        self, rewards: Iterable[Reward], names: Sequence[str], factor: float | None
    ) -> float | None:
        """Return the sum of the session's rewards ``names`` as the number of one role.

        The result is ``None`` if the session has none of them. ``factor`` applies if there are
        weights that do not name a reward. If it is ``None``, such a reward does not count.
        """
        given = list(rewards)
        named = _whole(self.counted(given))
        weights = self.weights or {}
        default = 1.0 if self.weights is None else factor
        factors = {name: weights.get(name, default) for name in names if name in named}
        values = [by * named[name] for name, by in factors.items() if by is not None]
        return _limit(given)(math.fsum(values)) if values else None

    def counted(self, rewards: Iterable[Reward]) -> list[Reward]:
        """Return the scores that count, whatever their name."""
        return [one for one in rewards if one.is_score and self._counts(one)]

    def _counts(self, reward: Reward) -> bool:
        """Return whether the reward's source counts; a scorer's does if its name has a weight."""
        sources = VERIFIER_ALONE if self.sources is None else self.sources
        chosen = reward.source is RewardSource.SCORER and reward.name in (self.weights or ())
        return chosen or reward.source in sources

    def chosen(self, named: Mapping[str, float]) -> dict[str, float]:
        """Return the rewards of a session that make up its number."""
        if self.weights is not None:
            return {name: named[name] for name in self.weights if name in named}
        return {MAIN: named[MAIN]} if MAIN in named else dict(named)

    def stated(self, rewards: Iterable[Reward]) -> str:
        """Return one line that states which of the session's rewards make up its number.

        It is empty for a session without any.
        """
        given = list(rewards)
        whole, parts = self._stated_whole(given), self._stated_parts(given)
        return "; ".join(line for line in (whole, parts) if line)

    def _stated_whole(self, rewards: Sequence[Reward]) -> str:
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

    def _stated_parts(self, rewards: Sequence[Reward]) -> str:
        """Return the effect of the rewards of parts on the session's number, if there are any."""
        counted = self.counted(rewards)
        parts = {one.name for one in counted if not one.whole}
        parts &= parts if self.weights is None else self.weights.keys()
        if not parts:
            return ""
        names = ", ".join(sorted(parts))
        if self.turns is not None:
            return f"the {self.turns} of {names} over its calls and roles is added"
        return f"{names} of its calls and roles counts in estimators for steps and roles alone"

    def as_data(self) -> dict[str, Any]:
        """Return JSON-ready data, equal for equal aggregations."""
        weights = None if self.weights is None else dict(sorted(self.weights.items()))
        sources = None if self.sources is None else sorted(self.sources)
        return {"weights": weights, "turns": self.turns, "sources": sources}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Aggregation:
        """Return the aggregation that :meth:`as_data` wrote.

        Raise ``TypeError`` for unknown settings.
        """
        sources = data.get("sources")
        return cls(**{**data, "sources": None if sources is None else tuple(sources)})

    def _factor(self, reward: Reward) -> float:
        return 1.0 if self.weights is None else self.weights[reward.name]

    def _totals(
        self, limit: Callable[[float], float], at: Iterable[tuple[str | None, Reward]]
    ) -> dict[str, float]:
        """Return the weighted sum of the rewards at each place, without those at ``None``."""
        totals: dict[str, float] = {}
        for place, one in at:
            if place is not None:
                totals[place] = totals.get(place, 0.0) + self._factor(one) * one.value
        return {place: limit(value) for place, value in totals.items()}

    def _sum(self, named: Mapping[str, float]) -> float | None:
        if not named:
            return None
        if self.weights is None:
            return math.fsum(named.values())
        return math.fsum(self.weights[name] * value for name, value in named.items())


class CountedRewards:
    """A selection of the rewards that count.

    Each run states its sources in its configuration; the verifier's rewards alone count if it
    states none. For a session of no run, those of the verifier and of the operator count.
    """

    def __init__(self, reader: Reader, sources: Sequence[str] | None = None) -> None:
        """Read the runs' rules from ``reader``. ``sources`` replace those that runs state."""
        self._reader = reader
        self._sources = None if sources is None else tuple(sources)
        self._stated: dict[str | None, Aggregation] = {}
        """Aggregations by run id."""

    def aggregation(self, run_id: str | None) -> Aggregation:
        """Return the rules for the sessions of a run; ``None`` stands for sessions of no run."""
        if run_id not in self._stated:
            stated = self._read(run_id)
            default = EVERYBODY if run_id is None else VERIFIER_ALONE
            sources = self._sources or stated.sources or default
            self._stated[run_id] = replace(stated, sources=sources)
        return self._stated[run_id]

    def number(self, run_id: str | None, rewards: Iterable[Reward]) -> float | None:
        """Return the number of a session of that run."""
        return self.aggregation(run_id).value(rewards)

    def sources(self, run_id: str | None) -> tuple[str, ...]:
        """Return the sources whose rewards count in a run."""
        return self.aggregation(run_id).sources or VERIFIER_ALONE

    def of(self, session: SessionRecord, rewards: Iterable[Reward]) -> list[Reward]:
        """Return the session's ``rewards`` that count and its findings, oldest first."""
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
    """A callback that reports which rewards make up a session's number.

    Each different statement is reported once.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._reported: set[str] = set()

    def __call__(self, aggregation: Aggregation, rewards: Iterable[Reward]) -> None:
        line = aggregation.stated(rewards)
        if line and line not in self._reported:
            self._reported.add(line)
            self._report(line)


def _limit(rewards: Iterable[Reward]) -> Callable[[float], float]:
    """Return a function that caps numbers at 0 if a finding zeroes the session.

    Otherwise, return the identity.
    """
    return (lambda value: min(0.0, value)) if zeroed(rewards) else (lambda value: value)


def _scores(rewards: Iterable[Reward]) -> list[Reward]:
    """Return the latest score of each name and place, in the order in which they were given."""
    latest: dict[tuple[Any, ...], Reward] = {}
    for one in sorted(rewards, key=lambda reward: reward.created_at):
        if one.is_score:
            latest.pop((one.name, one.place), None)
            latest[one.name, one.place] = one
    return list(latest.values())


def _call_of(reward: Reward) -> str | None:
    """Return the call at which a reward counts: its own, or the one that ends its branch."""
    return reward.branch if reward.call_id is None else reward.call_id


def _whole(rewards: Iterable[Reward]) -> dict[str, float]:
    return {one.name: one.value for one in _scores(one for one in rewards if one.whole)}
