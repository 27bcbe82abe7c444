"""The preparation of a step's sessions: rewards, advantages, filters, the account of tokens.

The order is always the same: rewards; removal of sessions that say nothing about the policy;
advantages over whole groups; a teacher's part; then the filters. So no filter shifts a baseline.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bridle.reconstruct.rewards import Numbers, without_findings, zeroed
from bridle.reconstruct.samples.sample import Episode, Sample
from bridle.trainer.batch.figures import advantages, figures
from bridle.trainer.batch.filters import (
    DropReason,
    MaskReason,
    TokenAccount,
    account_of,
    filtered,
    masked,
    not_trained,
    outside_the_baseline,
)
from bridle.trainer.batch.signal import signal
from bridle.trainer.config import AdvantageConfig, GrpoConfig
from bridle.trainer.credit import (
    ADVANTAGES,
    Credit,
    CreditGroup,
    Likelihoods,
    estimated,
    is_remembering,
    is_stepwise,
)
from bridle.trainer.credit.distillation import AskTeacher, TeacherGap, taught
from bridle.trainer.credit.privileged import Attempt, Inform, plain
from bridle.trainer.credit.rewards import numbers_of
from bridle.trainer.filters.overlong import overlong_punishment
from bridle.trainer.filters.resample_on_correct import kept_on_correct

_NOTHING: Final = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class TrainItem:
    """One branch to train, with the credit of its tokens."""

    sample: Sample
    session: int
    """Index of its session among the step's episodes."""
    group: Hashable
    credit: NDArray[np.float32]
    """``float32[T]``: the advantage of each of the sample's tokens."""


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """The branches that a step trains, and the reasons for leaving out the rest."""

    items: tuple[TrainItem, ...]
    accounts: tuple[TokenAccount, ...]
    """The account of each of the step's episodes."""
    session_rewards: dict[int, float]
    """Rewards of the sessions that count in a baseline, by their index among the step's
    episodes."""
    group_rewards: tuple[float, ...]
    """Mean of these rewards in each group."""
    degenerate_groups: int
    punished_sessions: int
    """Number of sessions whose reward is reduced for their length."""
    sessions_dropped: dict[str, int]
    """Number of dropped sessions by reason."""
    staleness: NDArray[np.int64]
    """``int64[M]``: number of versions by which each trained token lags behind the one in
    training."""
    unplaced_rewards: int = 0
    """Number of rewards of turns that their sessions do not have, which therefore count nowhere."""
    signal: Mapping[str, float] = field(default_factory=dict)
    """Figures of the sessions by name (:mod:`bridle.trainer.batch.signal`,
    :mod:`bridle.trainer.batch.figures`)."""
    teacher_gap: TeacherGap | None = None
    """The difference between the teacher and the policy, or ``None`` without a teacher."""

    @property
    def account(self) -> TokenAccount:
        return sum(self.accounts, TokenAccount())

    @property
    def rewards(self) -> tuple[float, ...]:
        """Rewards of the sessions that count in a baseline."""
        return tuple(self.session_rewards.values())

    @property
    def groups(self) -> int:
        return len(self.group_rewards)


def prepare(
    episodes: Sequence[Episode],
    version: int,
    config: GrpoConfig,
    memory: dict[str, float] | None = None,
    teacher: AskTeacher | None = None,
    inform: Inform = plain,
    earlier: Sequence[Episode] = (),
    likelihoods: Likelihoods | None = None,
) -> PreparedStep:
    """Decide for every session whether and with which advantage it is trained at ``version``.

    ``earlier`` are siblings that earlier steps have trained; they count in a baseline only.
    ``memory`` is the state that estimators keep over the steps of a run; they change it.
    ``teacher`` scores every session that is not left out for its own sake, whatever its group's
    rewards, with the context that ``inform`` puts into its prompt. ``likelihoods`` scores texts for
    the estimators that need it. Their errors are raised.
    """
    own = range(len(episodes))
    episodes = [*episodes, *_siblings(earlier, config)]
    judgement = cache(lambda index: filtered(episodes[index], config.filters))

    def fate(index: int, degenerate_group: bool) -> str | None:
        reason = not_trained(
            episodes[index],
            degenerate_group=degenerate_group,
            version=version,
            max_staleness=config.oldest_lag,
            config=config.filters,
        )
        return judgement(index).reason if reason is None else reason

    memory = {} if memory is None else memory
    stated = config.advantages
    numbers = [numbers_of(episode, stated) for episode in episodes]
    given = [compared_by(one, stated) for one in numbers]
    punished = [_punishment(episode, stated) for episode in episodes]
    rewards = [
        None if reward is None else reward + less
        for reward, less in zip(given, punished, strict=True)
    ]
    reasons: list[str | None] = [
        outside_the_baseline(episode, reward, config.filters)
        for episode, reward in zip(episodes, rewards, strict=True)
    ]
    compared = {
        index: reward
        for index, reward in enumerate(rewards)
        if reward is not None and reasons[index] is None
    }
    if config.filters.resample_on_correct:
        for index in _resampled(episodes, compared, config.seed):
            reasons[index] = DropReason.RESAMPLED
            del compared[index]
    members = _members(episodes, compared)
    credit: dict[int, list[NDArray[np.float32]]] = {}
    for indices in members.values():
        credit |= _credit(episodes, punished, indices, config, (memory, likelihoods))
    teacher_gap, without_context = None, list[int]()
    if teacher is not None:
        asked = [i for i in compared if i in own and fate(i, degenerate_group=False) is None]
        attempts = {index: _attempt(episodes, compared, members, index) for index in asked}
        teacher_gap, without_context = _add_teacher(credit, attempts, config, teacher, inform)
    degenerate = {
        group
        for group, indices in members.items()
        if not any(_teaches(episodes[index], credit[index]) for index in indices)
    }
    untaught = {
        index: DropReason.NO_CONTEXT
        for index in without_context
        if not _teaches(episodes[index], credit[index])
    }
    for index in compared:
        equal = group_of(episodes[index]) in degenerate
        reasons[index] = untaught.get(index) or fate(index, degenerate_group=equal)
    oldest = version - config.oldest_lag
    judged = list(episodes)
    for index, reason in enumerate(reasons):
        if reason is None:
            stale = [sample.versions < oldest for sample in episodes[index].samples]
            alone = [np.isnan(part) for part in credit[index]]
            judged[index] = masked(episodes[index], stale, MaskReason.STALE)
            judged[index] = masked(judged[index], alone, MaskReason.NO_BASELINE)
            for name, tokens in judgement(index).tokens.items():
                judged[index] = masked(judged[index], tokens, name)
    judged, reasons, punished = judged[: len(own)], reasons[: len(own)], punished[: len(own)]
    compared = {index: reward for index, reward in compared.items() if index in own}
    members = _members(episodes, compared)
    accounts = tuple(map(account_of, judged, reasons))
    dropped = [str(reason) for reason in reasons if reason is not None]
    items = [
        TrainItem(sample, index, group_of(judged[index]), part)
        for index in compared
        if reasons[index] is None
        for sample, part in zip(judged[index].samples, credit[index], strict=True)
        if sample.mask.any() and sample.weight > 0
    ]
    return PreparedStep(
        items=tuple(items),
        accounts=accounts,
        session_rewards=compared,
        group_rewards=tuple(
            float(np.mean([compared[index] for index in indices])) for indices in members.values()
        ),
        degenerate_groups=len(degenerate & members.keys()),
        punished_sessions=sum(less < 0 for less in punished),
        sessions_dropped={name: dropped.count(name) for name in sorted(set(dropped))},
        staleness=version - np.concatenate([_NOTHING, *(_versions(item.sample) for item in items)]),
        unplaced_rewards=sum(len(one.unplaced) for one in numbers[: len(own)]),
        signal=_signal(
            episodes[: len(own)], compared, members, numbers[: len(own)], accounts, items
        ),
        teacher_gap=teacher_gap,
    )


def _signal(
    episodes: Sequence[Episode],
    compared: Mapping[int, float],
    members: Mapping[Hashable, Sequence[int]],
    numbers: Sequence[Numbers],
    accounts: Sequence[TokenAccount],
    items: Sequence[TrainItem],
) -> dict[str, float]:
    groups = tuple(members.values())
    return {
        **signal(episodes, compared, groups),
        **figures(episodes, compared, groups, numbers, accounts),
        **advantages([item.credit[item.sample.mask] for item in items]),
    }


def _siblings(earlier: Sequence[Episode], config: GrpoConfig) -> Sequence[Episode]:
    """Return those of ``earlier`` that the estimator compares with; none if it remembers."""
    return () if is_remembering(ADVANTAGES.get(config.advantages.baseline)) else earlier


def _members(episodes: Sequence[Episode], indices: Iterable[int]) -> dict[Hashable, list[int]]:
    """Return the sessions ``indices`` by their group."""
    members: dict[Hashable, list[int]] = {}
    for index in indices:
        members.setdefault(group_of(episodes[index]), []).append(index)
    return members


def _resampled(
    episodes: Sequence[Episode], compared: Mapping[int, float], seed: int
) -> Iterator[int]:
    """Yield the sessions that resampling on correct leaves out of their groups."""
    for indices in _members(episodes, compared).values():
        rewards = np.asarray([compared[index] for index in indices])
        kept = kept_on_correct([episodes[index] for index in indices], rewards, seed)
        yield from (index for index, keep in zip(indices, kept, strict=True) if not keep)


def compared_by(numbers: Numbers, stated: AdvantageConfig) -> float | None:
    """Return the number by which a session is compared.

    It is the return of the whole episode for stepwise estimators without ``reward_turns``, and
    otherwise the session's number.
    """
    by_steps = is_stepwise(ADVANTAGES.get(stated.baseline)) and stated.reward_turns is None
    return numbers.episode if by_steps else numbers.value


def _punishment(episode: Episode, stated: AdvantageConfig) -> float:
    if not stated.overlong_tokens:
        return 0.0
    sampled = episode.conservation.captured
    return overlong_punishment(sampled, stated.overlong_tokens, stated.overlong_margin)


def _versions(sample: Sample) -> NDArray[np.int64]:
    versions: NDArray[np.int64] = sample.versions[sample.mask]
    return versions


def group_of(episode: Episode) -> Hashable:
    """Return the key of the sessions that are compared with each other.

    The key is the group, else the task, else the session alone.
    """
    session = episode.session
    if session.task_id is None or session.group_id is not None:
        return session.group_id or session.id
    return session.task_suite, session.task_split, session.task_id


def _credit(
    episodes: Sequence[Episode],
    punished: Sequence[float],
    indices: Sequence[int],
    config: GrpoConfig,
    sources: tuple[dict[str, float], Likelihoods | None],
) -> dict[int, list[NDArray[np.float32]]]:
    """Return the credit of the samples of one group's sessions, by session index.

    If a finding takes a session's rewards, its tokens get no more credit than they would without
    the finding. The estimators alone do not ensure that: a step may compare better once the steps
    beside it have lost their rewards.
    """
    own = [episodes[index] for index in indices]
    less = [punished[index] for index in indices]
    memory, likelihoods = sources
    before = dict(memory)
    credit = _estimated(own, less, config, sources, episodes)
    taken = [place for place, episode in enumerate(own) if zeroed(episode.rewards)]
    if taken:
        plain = [replace(one, rewards=without_findings(one.rewards)) for one in own]
        otherwise = _estimated(plain, less, config, (before, likelihoods), episodes)
        for place in taken:
            pairs = zip(credit[place], otherwise[place], strict=True)
            credit[place] = [np.minimum(part, other) for part, other in pairs]
    return dict(zip(indices, credit, strict=True))


def _estimated(
    episodes: Sequence[Episode],
    less: Sequence[float],
    config: GrpoConfig,
    sources: tuple[dict[str, float], Likelihoods | None],
    batch: Sequence[Episode],
) -> Credit:
    stated = config.advantages
    values = [numbers_of(episode, stated).value or 0.0 for episode in episodes]
    rewards = np.asarray(values, np.float64) + np.asarray(less, np.float64)
    memory, likelihoods = sources
    group = CreditGroup(episodes, rewards, stated, memory, batch, likelihoods)
    return estimated(group)


def _teaches(episode: Episode, credit: Sequence[NDArray[np.float32]]) -> bool:
    """Return whether a token that would be trained has an advantage other than 0.

    NaN counts as none.
    """
    return any(
        bool(np.any(np.nan_to_num(part[sample.mask])))
        for sample, part in zip(episode.samples, credit, strict=True)
    )


def _attempt(
    episodes: Sequence[Episode],
    compared: Mapping[int, float],
    members: Mapping[Hashable, Sequence[int]],
    index: int,
) -> Attempt:
    """Return one session with the others of its group."""
    others = (one for one in members[group_of(episodes[index])] if one != index)
    siblings = tuple(Attempt(episodes[one], compared[one]) for one in others)
    return Attempt(episodes[index], compared[index], siblings)


def _add_teacher(
    credit: dict[int, list[NDArray[np.float32]]],
    attempts: Mapping[int, Attempt],
    config: GrpoConfig,
    teacher: AskTeacher,
    inform: Inform,
) -> tuple[TeacherGap, list[int]]:
    """Add the teacher's part to the credit of the sessions ``attempts``.

    Return the sessions that have no context, beside the summary.
    """
    given = {index: inform(attempt) for index, attempt in attempts.items()}
    placed = [
        (index, number, attempts[index].episode.samples[number], insertion)
        for index, insertions in given.items()
        for number, insertion in enumerate(insertions or ())
    ]
    gaps = teacher([insertion.into(sample) for _, _, sample, insertion in placed])
    scored = [np.zeros(0, np.float32)]
    for (index, number, sample, insertion), informed in zip(placed, gaps, strict=True):
        gap = insertion.out_of(informed)
        credit[index][number] = taught(credit[index][number], gap, config.distillation)
        scored.append(gap[sample.mask])
    without = [index for index, insertions in given.items() if insertions is None]
    return TeacherGap.of(np.concatenate(scored), config.distillation, len(without)), without
