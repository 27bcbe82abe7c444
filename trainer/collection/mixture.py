"""Recorded sessions beside a step's own: demonstrations, failures, or successes of other runs.

A selection of the store gives the candidates. Of each task the latest are kept (its *buffer*), and
a step draws from the tasks in turn, so that no task takes the whole share. A drawn session is
judged as the step's own are, by its outcome, its reward and the run's filters. All of its tokens
get

    ``A = R - b``

``b`` is the mean reward of its task's latest group in this run, or that of the latest group of any
task if its own has had none. So a failure counts against the policy as long as the policy does
better, and a success counts for it as long as the policy does worse. As with success replay, the
advantage is not divided by a standard deviation.

Tokens keep the logprobs that were recorded. ``loss.importance`` therefore weighs them by
``π_old / μ``, truncated as for a stale token, and the trust region applies. Versions of another run
mean nothing in this one, so these tokens have the version :data:`ELSEWHERE`, and no limit of
staleness holds for them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from bridle.reconstruct.samples.sample import Episode
from bridle.store.records import SessionRecord
from bridle.trainer.batch.filters import TokenAccount
from bridle.trainer.batch.own_tokens import of_policy
from bridle.trainer.batch.prepare import PreparedStep, TrainItem, group_of, prepare
from bridle.trainer.collection.background import began
from bridle.trainer.config import GrpoConfig

ELSEWHERE: Final = -1
"""The policy version of a token that another run sampled."""
ORIGIN: Final = "recording"
"""The reason of trained tokens in the account of tokens, by which they differ from a run's own."""
_LATEST: Final = "recordings|latest"


@dataclass(frozen=True, slots=True)
class Mixed:
    """The recorded sessions that a step trains beside its own."""

    episodes: tuple[Episode, ...] = ()
    accounts: tuple[TokenAccount, ...] = ()
    """The account of each session."""
    items: tuple[TrainItem, ...] = ()
    candidates: int = 0
    """Number of sessions that the step could draw from."""

    def metrics(self) -> dict[str, float]:
        advantages = [float(item.credit[0]) for item in self.items]
        return {
            "recordings/sessions": float(len({item.session for item in self.items})),
            "recordings/tokens": float(sum(int(one.sample.mask.sum()) for one in self.items)),
            "recordings/candidates": float(self.candidates),
            **({"recordings/advantage": float(np.mean(advantages))} if advantages else {}),
        }


@dataclass(frozen=True, slots=True)
class Mixture:
    """The selection of recorded sessions that the steps of a run draw from."""

    find: Callable[[], Iterable[SessionRecord]]
    """Returns the selected sessions that are sealed, as the store has them now."""
    load: Callable[[str], Episode]
    share: float
    """Number of recorded sessions in a step, as a fraction of its own, rounded."""
    per_task: int
    """Number of latest sessions of a task that are kept."""

    def draw(
        self,
        own: Sequence[Episode],
        taken: AbstractSet[str],
        config: GrpoConfig,
        memory: dict[str, float],
        *,
        step: int,
        policy: str,
    ) -> Mixed:
        """Draw the sessions that ``step`` trains beside ``own``.

        Sessions of ``own`` and ``taken`` are not drawn, and none is drawn twice. The draw depends
        on ``config.seed`` and ``step``. ``memory`` has the baselines (:func:`learn_baselines`). If
        a session has several policies, the tokens of ``policy`` are trained.
        """
        buffers = self._buffers({one.session.id for one in own} | taken, own)
        rng = np.random.default_rng([config.seed, step, len(ORIGIN)])
        chosen = _in_turn(buffers, round(self.share * len(own)), rng)
        episodes = tuple(_elsewhere(of_policy(self.load(one.id), policy)) for one in chosen)
        prepared = prepare(episodes, 0, _judging(config))
        items = tuple(
            replace(
                item,
                # Success replay has the numbers in between.
                session=2 * len(own) + item.session,
                group=(ORIGIN, item.sample.session_id),
                credit=np.full(len(item.credit), advantage, np.float32),
            )
            for item in prepared.items
            if (advantage := _advantage(episodes, prepared, item, memory))
        )
        trained = sorted({item.session - 2 * len(own) for item in items})
        return Mixed(
            tuple(episodes[index] for index in trained),
            tuple(prepared.accounts[index] for index in trained),
            items,
            sum(map(len, buffers)),
        )

    def _buffers(
        self, known: AbstractSet[str], own: Sequence[Episode]
    ) -> list[list[SessionRecord]]:
        """Return the latest sessions of each task that the step may train, by their beginning.

        A session of another vocabulary than that of the step's own is left out.
        """
        vocabularies = {one.session.vocabulary for one in own} - {None}
        found: dict[Hashable, list[SessionRecord]] = {}
        for one in sorted(self.find(), key=began):
            fits = one.vocabulary is None or not vocabularies or one.vocabulary in vocabularies
            if one.id not in known and fits:
                found.setdefault(_task(one), []).append(one)
        return [sessions[-self.per_task :] for sessions in found.values()]


def learn_baselines(
    own: Sequence[Episode], prepared: PreparedStep, memory: dict[str, float]
) -> None:
    """Put the mean rewards of a step's groups into ``memory``, by task."""
    groups: dict[Hashable, list[int]] = {}
    for index in prepared.session_rewards:
        groups.setdefault(group_of(own[index]), []).append(index)
    for indices in groups.values():
        mean = float(np.mean([prepared.session_rewards[index] for index in indices]))
        memory[_LATEST] = memory[_key(own[indices[0]].session)] = mean


def _advantage(
    episodes: Sequence[Episode],
    prepared: PreparedStep,
    item: TrainItem,
    memory: dict[str, float],
) -> float:
    """Return ``R - b``, or 0 if there is no baseline."""
    baseline = memory.get(_key(episodes[item.session].session), memory.get(_LATEST))
    return 0.0 if baseline is None else prepared.session_rewards[item.session] - baseline


def _in_turn(
    buffers: Sequence[Sequence[SessionRecord]], wanted: int, rng: np.random.Generator
) -> list[SessionRecord]:
    """Draw ``wanted`` sessions without replacement, one of each task in turn."""
    shuffled = [
        [buffers[at][place] for place in rng.permutation(len(buffers[at]))]
        for at in rng.permutation(len(buffers))
    ]
    rounds = max(map(len, shuffled), default=0)
    found = [own[turn] for turn in range(rounds) for own in shuffled if turn < len(own)]
    return found[:wanted]


def _judging(config: GrpoConfig) -> GrpoConfig:
    """Return the settings by which single sessions are judged: no group, and no limit of age."""
    filters = replace(config.filters, drop_zero_variance=False, resample_on_correct=False)
    advantages = replace(config.advantages, baseline="none")
    return replace(config, filters=filters, advantages=advantages, max_staleness=-ELSEWHERE)


def _elsewhere(episode: Episode) -> Episode:
    samples = tuple(
        replace(one, versions=np.full_like(one.versions, ELSEWHERE)) for one in episode.samples
    )
    return replace(episode, samples=samples)


def _task(session: SessionRecord) -> Hashable:
    """Return the task of a session, or the session alone."""
    if session.task_id is None:
        return session.id
    return session.task_suite, session.task_split, session.task_id


def _key(session: SessionRecord) -> str:
    return f"recordings|{_task(session)!r}"
