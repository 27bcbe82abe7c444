"""Warnings of a collapse: rules over the steps of a training run.

At each step a rule compares the median of the last three steps with that of the ten before them,
and with that of the first ten. A rule returns its evidence, or ``None``. Most of them ask whether
the reward has risen meanwhile: a policy that gets better has less entropy and less variance, too.
The numbers are those of :mod:`bridle.trainer.report`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final, NamedTuple

from bridle.diagnosis.facts import Facts
from bridle.diagnosis.findings.finding import Finding, Severity
from bridle.store.records import Metric

_NOW: Final = 3
"""Number of steps that a rule takes for the present."""
_THEN: Final = 10
"""Number of steps with which it compares them."""
_LEAST: Final = 5
"""The least number of earlier steps that have a number."""

Steps = Mapping[str, Mapping[int, float]]
"""The numbers of a run's steps, by name and step."""


class Change(NamedTuple):
    """The median of a number in earlier steps, and in the last three."""

    before: float
    after: float

    @property
    def factor(self) -> float:
        """The quotient of the two; infinite if the earlier one is 0."""
        if self.before:
            return self.after / self.before
        return float("inf") if self.after > 0 else 1.0

    def __str__(self) -> str:
        return f"{self.before:.3g} → {self.after:.3g}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The last steps of a run, compared with earlier ones."""

    steps: Steps
    now: range
    then: range
    rewards: tuple[float, float]
    """The least and the largest reward of a session so far."""

    def change(self, name: str) -> Change | None:
        """Return the change of a number, or ``None`` if too few steps have it."""
        before, after = self.values(name, self.then), self.values(name, self.now)
        if len(before) < _LEAST or len(after) < 2:
            return None
        return Change(median(before), median(after))

    def values(self, name: str, steps: range) -> list[float]:
        """Return the number at each of ``steps`` that has it."""
        own = self.steps.get(name, {})
        return [own[step] for step in steps if step in own]

    def improves(self, by: float = 0.05) -> bool:
        """Return whether the mean reward has risen by a share of its range, or is near its best."""
        reward, (low, high) = self.change("reward/mean"), self.rewards
        if reward is None or not high > low:
            return False
        gain, level = reward.after - reward.before, reward.after - low
        return gain > by * (high - low) or level >= 0.9 * (high - low)


Rule = Callable[[Comparison], str | None]


def _variance(at: Comparison) -> str | None:
    std = at.change("signal/group_std")
    if std is None or std.before <= 0 or std.factor > 0.3 or at.improves():
        return None
    return f"the rewards of a group differ by {std} (standard deviation)"


def _entropy(at: Comparison) -> str | None:
    entropy = at.change("update/entropy")
    if entropy is None or entropy.factor > 0.4 or at.improves(by=0.15):
        return None
    return f"{entropy} nats a token, while the reward has hardly risen"


def _gradient(at: Comparison) -> str | None:
    norm = at.change("update/grad_norm")
    if norm is None or norm.factor < 5 or at.improves():
        # Near the best reward, a rare failure has a large gradient without any harm.
        return None
    return f"a norm of {norm}"


def _calls(at: Comparison) -> str | None:
    calls, tokens = at.change("signal/calls"), at.change("signal/reply_tokens")
    if calls is None or tokens is None or calls.factor > 0.6 or tokens.factor < 1.5:
        return None
    return f"{calls} calls a session, {tokens} tokens a call"


def _repeats(at: Comparison) -> str | None:
    share = at.change("signal/repeats")
    if share is None or share.after < 0.2 or share.after - share.before < 0.15:
        return None
    return f"{share} of the sampled tokens repeat earlier ones of their session"


def _length(at: Comparison) -> str | None:
    related = at.values("signal/length_reward", range(at.now.stop - 5, at.now.stop))
    calls, tokens = at.change("signal/calls"), at.change("signal/reply_tokens")
    if len(related) < 4 or calls is None or tokens is None or not tokens.before * calls.before:
        return None
    strength = median(related)
    growth = calls.factor * tokens.factor
    if abs(strength) < 0.6 or (growth < 1.4 if strength > 0 else growth > 1 / 1.4):
        return None
    return f"a correlation of {strength:.2f}, and {growth:.2g} times the tokens a session"


def _one_task(at: Comparison) -> str | None:
    groups, equal = at.change("groups/collected"), at.change("groups/zero_variance")
    top = at.values("signal/top_group", range(at.now.stop - 5, at.now.stop))
    if groups is None or equal is None or groups.after < 4 or at.improves():
        return None
    before = at.change("signal/top_group")
    if len(top) < 4 or min(top) < 0.9 or before is None or before.before > 0.8:
        return None
    return f"one of {groups.after:.0f} groups has {median(top):.0%} of the variance"


def _bound(at: Comparison) -> str | None:
    (low, high), last = at.rewards, range(at.now.stop - 4, at.now.stop)
    means, spreads = at.values("reward/mean", last), at.values("reward/std", last)
    if not high > low or len(means) < 4 or len(spreads) < 4:
        return None
    room, middle = 0.01 * (high - low), (low + high) / 2
    if max(spreads) > room or min(abs(means[-1] - low), abs(means[-1] - high)) > room:
        return None
    before = at.values("reward/mean", range(last.start - _THEN, last.start))
    if means[-1] > middle and min(before, default=high) > middle:
        # A policy that has learned its tasks step by step.
        return None
    return f"all rewards of four steps are {means[-1]:.3g}, the bound of their range"


def _judges(at: Comparison) -> str | None:
    spread = at.change("judge/spread")
    if spread is not None and spread.after - spread.before >= 0.2:
        return f"the judges of a rubric disagree by {spread}"
    score, verified = at.change("judge/score"), at.change("judge/verifier")
    if score is None or verified is None:
        return None
    if score.after - score.before < 0.1 or verified.after - verified.before > 0.02:
        return None
    return f"the judges' score {score} rises without the verifier's reward {verified}"


@dataclass(frozen=True, slots=True)
class _Collapse:
    name: str
    rule: Rule
    cause: str
    remedy: str
    severity: Severity = Severity.WARNING


_COLLAPSES: Final = (
    _Collapse(
        "reward_variance_cliff",
        _variance,
        "The sessions of a group have come to the same reward, and it is not a high one",
        "Choose tasks that are solved sometimes (`groups.weighted`), raise the sampling "
        "temperature, or go back to an earlier checkpoint with a lower learning rate.",
    ),
    _Collapse(
        "entropy_collapse",
        _entropy,
        "The policy has become certain without getting better",
        "Lower the learning rate, clip higher (`training.loss`), or add an entropy term; the best "
        "checkpoint is kept beside the newest.",
    ),
    _Collapse(
        "gradient_spikes",
        _gradient,
        "The gradients are far above the usual",
        "Lower `training.optimizer.grad_clip` or the learning rate, and look at the sessions of "
        "that step: one very long session, or stale tokens, often cause it.",
    ),
    _Collapse(
        "fewer_calls_longer_replies",
        _calls,
        "The agent acts less and writes more",
        "Look at the newest sessions: the policy may answer from memory, or think until its limit. "
        "`overlong_tokens` and the scorer `cost` make length cost something.",
    ),
    _Collapse(
        "repeated_thoughts",
        _repeats,
        "Replies repeat what their session has sampled before",
        "Look at the newest sessions. The filter `over_turn`, a budget of calls, or a scorer for "
        "repeats ends such loops.",
    ),
    _Collapse(
        "length_rewarded",
        _length,
        "The reward goes with the length of a session, and the length follows it",
        "See whether the verifier or a judge pays length itself; `training.loss.aggregation` and "
        "`overlong_tokens` (docs/training.md) remove the gain.",
    ),
    _Collapse(
        "one_task_carries",
        _one_task,
        "One task carries the whole signal, and the others are not solved",
        "Draw tasks by their success (`groups.weighted`), or add easier ones.",
    ),
    _Collapse(
        "rewards_at_bound",
        _bound,
        "All rewards have jumped to a bound of their range, and nothing can be learned from them",
        "At the upper bound look at the newest sessions: the policy may have found a way to be "
        "paid without the work. At the lower one go back to an earlier checkpoint.",
        Severity.NOTE,
    ),
    _Collapse(
        "judge_drift",
        _judges,
        "The judges' scores have come apart from the verifier's, or from each other",
        "Read sessions that the judges like: the policy may have learned to please them. Change "
        "the rubric, or add judges.",
    ),
)


class CollapseWatch:
    """The collapses of a run, each of which is reported once, at its first step."""

    def __init__(self) -> None:
        self._steps: dict[str, dict[int, float]] = {}
        self._rewards = (math.inf, -math.inf)
        self._open = list(_COLLAPSES)

    def resume(self, metrics: Iterable[Metric], before: int) -> None:
        """Take the numbers of the steps up to ``before`` of an earlier attempt as reported."""
        for step, numbers in _by_step(metrics):
            if step < before:
                self.add(step, numbers)

    def add(self, step: int, numbers: Mapping[str, float]) -> list[Finding]:
        """Add the numbers of the next step; return the findings that are new."""
        for name, value in numbers.items():
            if math.isfinite(value):
                self._steps.setdefault(name, {})[step] = value
        low, high = self._rewards
        self._rewards = (
            min(low, numbers.get("reward/min", low)),
            max(high, numbers.get("reward/max", high)),
        )
        compared = tuple(self._comparisons(step))
        new = []
        for each in tuple(self._open):
            evidence = next(filter(None, map(each.rule, compared)), None)
            if evidence is not None:
                self._open.remove(each)
                shown = f"Step {step + 1}: {evidence}."
                new.append(Finding(each.name, each.severity, each.cause, shown, each.remedy))
        return new

    def _comparisons(self, step: int) -> Iterator[Comparison]:
        """Yield the comparisons with the steps just before these, and with the first ones."""
        begins = step + 1 - _NOW
        now = range(begins, step + 1)
        yield Comparison(self._steps, now, range(max(0, begins - _THEN), begins), self._rewards)
        if begins > 2 * _THEN:
            yield Comparison(self._steps, now, range(_THEN), self._rewards)


def collapses(metrics: Iterable[Metric]) -> list[Finding]:
    """Return the collapses of a whole run, in the order of the steps that show them first."""
    watch = CollapseWatch()
    return [one for step, numbers in _by_step(metrics) for one in watch.add(step, numbers)]


def collapses_of(facts: Facts) -> list[Finding]:
    """Return the collapses of the run that the facts are of."""
    return collapses(one for own in facts.metrics.values() for one in own)


def _by_step(metrics: Iterable[Metric]) -> list[tuple[int, dict[str, float]]]:
    """Return the numbers of each step, in the order of steps."""
    found: dict[int, dict[str, float]] = {}
    for one in metrics:
        found.setdefault(one.step, {})[one.name] = one.value
    return sorted(found.items())
