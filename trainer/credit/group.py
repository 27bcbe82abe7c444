"""The input of an advantage estimator: a group's sessions, their rewards, and their steps.

An estimator is a function from a :class:`CreditGroup` to the credit of every token. A *step* is a
call of a session of which a token is trained. Estimators read rewards only through
:mod:`bridle.reconstruct.rewards`, so that rewards of another source or name, and findings, change
no credit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bridle.errors import UsageError
from bridle.reconstruct.rewards import Numbers
from bridle.reconstruct.samples.sample import Episode, Sample, Turn
from bridle.registry import Registry
from bridle.trainer.config import AdvantageConfig
from bridle.trainer.credit.rewards import aggregation, calls_in_order, numbers_of

STD_EPSILON: Final = 1e-6

Credit = list[list[NDArray[np.float32]]]
"""Credit by episode and sample, ``float32[T]``. NaN marks a token that has nothing to be compared
with; it is masked as ``no_baseline``."""


Likelihoods = Callable[[Sequence[tuple[bytes, str]]], list[NDArray[np.float32]]]
"""A function that scores texts under the policy in training.

It takes pairs of a prompt, as :attr:`CreditStep.prompt`, and a text, and returns the logprobs of
the text's tokens after the prompt, ``float32[L]``."""


@dataclass(frozen=True, slots=True)
class CreditStep:
    """A call of a session of which a token is trained."""

    episode: int
    """Index of the episode in the group."""
    call_id: str
    role: str | None
    prompt: bytes
    """The ids before the call's first token as bytes, which are equal for equal prompts."""
    observation: str | bytes = b""
    """The text of the messages after the last reply, else the ids since the last sampled token."""
    turn: Turn | None = None
    """The call's text and result, or ``None`` if they are not known."""


@dataclass(frozen=True)
class CreditGroup:
    """Sessions that are compared with each other."""

    episodes: Sequence[Episode]
    rewards: NDArray[np.float64]
    """``float64[G]``: the number of each session. It is 0 for a session that has rewards of parts
    alone; only :func:`stepwise` estimators receive such sessions."""
    config: AdvantageConfig
    memory: dict[str, float] = field(default_factory=dict)
    """State that an estimator keeps from group to group of a run, by a key of its own."""
    batch: Sequence[Episode] = ()
    """All sessions that the step collected, those of other groups included."""
    likelihoods: Likelihoods | None = None
    """Scores under the policy in training; estimators marked by :func:`scoring` have it."""

    @cached_property
    def centred(self) -> NDArray[np.float64]:
        """The distance of each reward from the group's mean, ``float64[G]``.

        The distances are exact zeros if there is nothing to compare.
        """
        return centred(self.rewards)

    def deviation(self, values: NDArray[np.float64]) -> float:
        """Return the standard deviation of the sample or the population, as configured.

        It is 0 for one value.
        """
        if len(values) < 2:
            return 0.0
        return float(values.std(ddof=1 if self.config.deviation == "sample" else 0))

    @cached_property
    def steps(self) -> tuple[CreditStep, ...]:
        """The steps of all sessions, in the order of their first appearance."""
        found: dict[tuple[int, str], CreditStep] = {}
        for number, episode in enumerate(self.episodes):
            turns = {turn.call_id: turn for turn in episode.turns}
            for sample in episode.samples:
                for place, call_id in enumerate(sample.call_ids):
                    here = np.flatnonzero(sample.calls == place)
                    trained = len(here) > 0 and bool(sample.mask[here].any())
                    if trained and (number, call_id) not in found:
                        step = _step(sample, place, int(here[0]), turns.get(call_id))
                        found[number, call_id] = CreditStep(number, call_id, *step)
        return tuple(found.values())

    def score(self, asked: Sequence[tuple[bytes, str]]) -> list[NDArray[np.float32]]:
        """Return the logprobs of the tokens of texts after prompts (:data:`Likelihoods`).

        Raise :class:`UsageError` if the program that computes the credit has no policy.
        """
        if self.likelihoods is None:
            raise UsageError(
                f"{self.config.baseline} scores texts with the policy in training, and there is "
                "none here: choose another advantages.baseline, or run it with bridle train"
            )
        return self.likelihoods(asked)

    def logprobs(self, step: CreditStep) -> NDArray[np.float32]:
        """Return the recorded logprobs of a step's trained tokens, ``float32[M]``."""
        found = [
            sample.logprobs[sample.mask & (sample.calls == sample.call_ids.index(step.call_id))]
            for sample in self.episodes[step.episode].samples
            if step.call_id in sample.call_ids
        ]
        return np.concatenate(found)

    def steps_of(self, episode: int) -> list[CreditStep]:
        """Return the steps of one session, in the order in which its calls started."""
        own = {step.call_id: step for step in self.steps if step.episode == episode}
        return [own[one] for one in calls_in_order(self.episodes[episode]) if one in own]

    @cached_property
    def keeps_history(self) -> bool:
        """Return whether a prompt of a session is a longer form of its role's prompt before."""
        prompts: dict[tuple[int, str | None], list[bytes]] = {}
        for number in range(len(self.episodes)):
            for step in self.steps_of(number):
                prompts.setdefault((number, step.role), []).append(step.prompt)
        return any(
            len(later) > len(before) and later.startswith(before)
            for own in prompts.values()
            for before, later in pairwise(own)
        )

    def everywhere(self, advantages: NDArray[np.float64]) -> Credit:
        """Return the same credit for every token of a session; ``advantages`` is ``float64[G]``."""
        return [
            [np.full(len(sample.token_ids), value, np.float32) for sample in episode.samples]
            for episode, value in zip(self.episodes, advantages.tolist(), strict=True)
        ]

    def by_step(self, advantages: NDArray[np.float64]) -> Credit:
        """Return the same credit for every token of a step.

        ``advantages`` has one value for each of ``steps``.
        """
        values = {
            (step.episode, step.call_id): value
            for step, value in zip(self.steps, advantages.tolist(), strict=True)
        }
        return [
            [_of_calls(sample, number, values) for sample in episode.samples]
            for number, episode in enumerate(self.episodes)
        ]

    @cached_property
    def numbers(self) -> tuple[Numbers, ...]:
        """The numbers that the rewards of each session and its calls come to."""
        return tuple(numbers_of(episode, self.config) for episode in self.episodes)

    @cached_property
    def step_rewards(self) -> dict[tuple[int, str], float]:
        """The reward of each call itself, by episode and call.

        It is the sum over names; of several rewards with one name, the latest counts. A branch's
        reward is that of the call that ends it, and a role's that of its last step.
        """
        found: dict[tuple[int, str], float] = {}
        for number, one in enumerate(self.numbers):
            last = self.last_steps(number)
            at_roles = {last[role]: value for role, value in one.roles.items() if role in last}
            for place in (one.calls, at_roles):
                for call_id, value in place.items():
                    found[number, call_id] = found.get((number, call_id), 0.0) + value
        return found

    def last_steps(self, episode: int) -> dict[str | None, str]:
        """Return the last step of each role of a session, as its call."""
        return {step.role: step.call_id for step in self.steps_of(episode)}

    @cached_property
    def terminal(self) -> NDArray[np.float64]:
        """The number of each session without the part that ``reward_turns`` adds, ``float64[G]``.

        The part is added from the session's calls and roles. Rewards of roles that have no step in
        the session are included, because no step has them.
        """
        added = [(one.value or 0.0) - (one.own or 0.0) for one in self.numbers]
        terminal: NDArray[np.float64] = self.rewards - np.asarray(added, np.float64)
        for number, one in enumerate(self.numbers):
            acted = self.last_steps(number) if one.roles else {}
            terminal[number] += math.fsum(v for role, v in one.roles.items() if role not in acted)
        return terminal

    @cached_property
    def totals(self) -> NDArray[np.float64]:
        """``float64[G]``: the return of each episode.

        With ``reward_turns`` it is ``rewards``, which includes the rewards of parts already;
        otherwise they are added.
        """
        if self.config.reward_turns is not None:
            return self.rewards
        totals = self.terminal.copy()
        for (episode, _), value in self.step_rewards.items():
            totals[episode] += value
        return totals

    def given_to(self, episode: int, role: str | None) -> float | None:
        """Return the reward that a session was given for a role as a whole.

        It is the sum of those at the role and of the session's under the role's names
        (``role_rewards``), or ``None`` without any.
        """
        if role is None:
            return None
        mapped = self.config.role_rewards or {}
        stated = mapped.get(role, role)
        names = (stated,) if isinstance(stated, str) else stated
        factor = 1.0 if role in mapped else None
        named = aggregation(self.config).role(self.episodes[episode].rewards, names, factor)
        at_role = self.numbers[episode].roles.get(role)
        values = [value for value in (named, at_role) if value is not None]
        return math.fsum(values) if values else None

    def steps_reward(self, episode: int, role: str | None) -> float | None:
        """Return the sum of the rewards of a role's own calls, or ``None`` without any."""
        calls = self.numbers[episode].calls
        own = {one.call_id for one in self.steps if (one.episode, one.role) == (episode, role)}
        values = [value for call_id, value in calls.items() if call_id in own]
        return math.fsum(values) if values else None


def _step(
    sample: Sample, place: int, begins: int, turn: Turn | None
) -> tuple[str | None, bytes, str | bytes, Turn | None]:
    """Return the facts of a call whose first token is at ``begins``, as :class:`CreditStep`."""
    ids = sample.token_ids[:begins]
    earlier = np.flatnonzero(sample.calls[:begins] >= 0)
    since = ids[earlier[-1] + 1 :] if len(earlier) else ids
    seen = None if turn is None else turn.observation
    observation = since.tobytes() if seen is None else seen
    return role_of(sample, place), ids.tobytes(), observation, turn


def role_of(sample: Sample, place: int) -> str | None:
    """Return the role of one of a sample's calls."""
    return sample.roles[place] if sample.roles else sample.role


def _of_calls(
    sample: Sample, number: int, values: dict[tuple[int, str], float]
) -> NDArray[np.float32]:
    credit = np.zeros(len(sample.token_ids), np.float32)
    for place, call_id in enumerate(sample.call_ids):
        credit[sample.calls == place] = values.get((number, call_id), 0.0)
    return credit


def centred(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the distance of each value from the mean.

    The distances are exact zeros for fewer than two values, and for equal ones.
    """
    if len(values) < 2:
        return np.zeros_like(values)
    spread = float(values.max() - values.min())
    if spread <= 1e-9 * max(1.0, float(np.abs(values).max())):
        return np.zeros_like(values)
    distance: NDArray[np.float64] = values - values.mean()
    return distance


def normalized(
    group: CreditGroup, values: NDArray[np.float64], anchors: Sequence[Hashable]
) -> NDArray[np.float64]:
    """Return ``values`` normalised among those of the same anchor; 0 for one that stands alone."""
    members: dict[Hashable, list[int]] = {}
    for index, anchor in enumerate(anchors):
        members.setdefault(anchor, []).append(index)
    found = np.zeros_like(values)
    for indices in members.values():
        own = values[indices]
        found[indices] = centred(own) / (group.deviation(own) + STD_EPSILON)
    return found


Advantage = Callable[[CreditGroup], Credit]
STEPWISE: Final = "reads_step_rewards"


def stepwise(advantage: Advantage) -> Advantage:
    """Mark an estimator that reads the rewards of a session's calls, branches or roles.

    It compares sessions by :attr:`CreditGroup.totals`, and accepts sessions that have no other
    reward.
    """
    setattr(advantage, STEPWISE, True)
    return advantage


def is_stepwise(advantage: Advantage) -> bool:
    """Return whether the estimator is marked by :func:`stepwise`."""
    return bool(getattr(advantage, STEPWISE, False))


SCORING: Final = "scores_texts"
REMEMBERING: Final = "remembers_sessions"


def scoring(advantage: Advantage) -> Advantage:
    """Mark an estimator that calls :meth:`CreditGroup.score`."""
    setattr(advantage, SCORING, True)
    return advantage


def is_scoring(advantage: Advantage) -> bool:
    """Return whether the estimator is marked by :func:`scoring`."""
    return bool(getattr(advantage, SCORING, False))


def remembering(advantage: Advantage) -> Advantage:
    """Mark an estimator that learns from sessions into :attr:`CreditGroup.memory`.

    It compares with what it remembers, and gets no sibling that an earlier step has trained.
    """
    setattr(advantage, REMEMBERING, True)
    return advantage


def is_remembering(advantage: Advantage) -> bool:
    """Return whether the estimator is marked by :func:`remembering`."""
    return bool(getattr(advantage, REMEMBERING, False))


ADVANTAGES: Registry[Advantage] = Registry("advantage", "bridle.advantages")


def estimated(group: CreditGroup, name: str | None = None) -> Credit:
    """Return the credit of the estimator ``name`` with its options.

    The configured estimator is the default.
    """
    config = group.config
    return ADVANTAGES.configured(name or config.baseline, config.options)(group)


def register_advantage(name: str) -> Callable[[Advantage], Advantage]:
    """Return a decorator that makes a function the advantage that configurations name ``name``."""
    return ADVANTAGES.registered(name)
