"""Success replay: earlier successes of the run are trained again beside a step's own sessions.

Self-imitation as in SPEAR (arXiv 2509.22601). A session enters the buffer when its step trains it
with a positive advantage. When it is replayed, its reward ``R`` is compared with what the policy
has reached meanwhile, and all of its tokens get the advantage

    ``c (R - median(D))``  with  ``c = (1 - cos(π min(t / T, 1))) / 2``

where ``D`` are the mean rewards of the latest groups, ``t`` is the step from 0 and ``T`` the
warm-up. Sessions whose advantage is no longer positive are not drawn. Advantages are not divided
by a standard deviation, whatever the baseline of the step's own sessions is. Losses are
proportional to the advantage, so that ``c`` is the coefficient of the self-imitation loss; apart
from it a replayed session weighs as one of the step's own.

The buffer holds references. A checkpoint keeps it, and tokens stay in the store. Replayed tokens
have the logprobs that they were sampled with; :mod:`bridle.trainer.losses.importance` corrects for
their age.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridle.reconstruct.samples.sample import Episode, Sample
from bridle.store.errors import NotFound
from bridle.trainer.batch.prepare import PreparedStep, TrainItem
from bridle.trainer.config import GrpoConfig, ReplayConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Success:
    """A session that was trained with a positive advantage."""

    session_id: str
    reward: float
    version: int
    """The oldest policy version among the tokens that were trained."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The earlier successes that a step trains again."""

    items: tuple[TrainItem, ...]
    buffer: int
    """Number of sessions that the step could draw from."""
    staleness: NDArray[np.int64]
    """``int64[M]``: number of versions by which each replayed token lags behind the one in
    training."""

    @property
    def sessions(self) -> int:
        return len({item.session for item in self.items})

    def metrics(self) -> dict[str, float]:
        metrics = {
            "replay/sessions": float(self.sessions),
            "replay/tokens": float(len(self.staleness)),
            "replay/buffer": float(self.buffer),
        }
        if len(self.staleness):
            metrics["replay/staleness"] = float(self.staleness.mean())
        return metrics


@dataclass(frozen=True, slots=True)
class ReplayBuffer:
    """The latest successes of a run and the rewards that they are compared with, oldest first."""

    successes: tuple[Success, ...] = ()
    baselines: tuple[float, ...] = ()
    """The mean rewards of the latest groups."""

    def after(self, prepared: PreparedStep, config: ReplayConfig) -> ReplayBuffer:
        """Return the buffer after the completed step."""
        successes = (*self.successes, *_successes(prepared))
        baselines = (*self.baselines, *prepared.group_rewards)
        return ReplayBuffer(successes[-config.buffer :], baselines[-config.baselines :])

    def advantages(self, step: int, version: int, config: ReplayConfig) -> dict[Success, float]:
        """Return the present advantage of each session that ``step`` may replay at ``version``."""
        if not self.successes:
            return {}
        scale = coefficient(step, config.warmup_steps)
        baseline = float(np.median(self.baselines))
        found = {success: scale * (success.reward - baseline) for success in self.successes}
        oldest = version - config.max_staleness
        return {
            success: advantage
            for success, advantage in found.items()
            if advantage > 0 and success.version >= oldest
        }

    def draw(
        self,
        load: Callable[[str], Episode],
        config: GrpoConfig,
        *,
        step: int,
        version: int,
        sessions: int,
    ) -> Replay:
        """Draw the sessions that ``step`` trains at ``version`` besides ``sessions`` of its own.

        Sessions are drawn without replacement, with ``config.seed`` and ``step`` as the seed.
        ``load`` returns a recorded session; one that the store no longer has is left out.
        """
        advantages = self.advantages(step, version, config.replay)
        drawn = np.random.default_rng([config.seed, step]).choice(
            len(advantages),
            min(len(advantages), round(config.replay.share * sessions)),
            replace=False,
        )
        candidates = list(advantages.items())
        items: list[TrainItem] = []
        for session, place in enumerate(sorted(drawn.tolist()), start=sessions):
            success, advantage = candidates[place]
            items += _items(success, advantage, session, load)
        versions = [item.sample.versions[item.sample.mask] for item in items]
        return Replay(
            items=tuple(items),
            buffer=len(advantages),
            staleness=version - np.concatenate([np.zeros(0, np.int64), *versions]),
        )

    def renumbered(self, shift: int) -> ReplayBuffer:
        """Return the buffer after a change of numbers.

        See :mod:`bridle.trainer.collection.renumbering`.
        """
        successes = (replace(each, version=each.version + shift) for each in self.successes)
        return replace(self, successes=tuple(successes))

    def as_data(self) -> dict[str, Any]:
        """Return the plain data that a checkpoint keeps."""
        return {
            "successes": [[each.session_id, each.reward, each.version] for each in self.successes],
            "baselines": list(self.baselines),
        }

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> ReplayBuffer:
        """Return the buffer of a checkpoint, which is empty if the checkpoint has none."""
        successes = (Success(*each) for each in data.get("successes", ()))
        return cls(tuple(successes), tuple(data.get("baselines", ())))


def coefficient(step: int, warmup_steps: int) -> float:
    """Return the coefficient ``c`` of self-imitation in ``step``.

    It grows from 0 to 1 along half a cosine.
    """
    if step >= warmup_steps:
        return 1.0
    return (1 - math.cos(math.pi * step / warmup_steps)) / 2


def _successes(prepared: PreparedStep) -> list[Success]:
    """Return the sessions whose trained tokens have a positive advantage on average."""
    trained: dict[int, list[TrainItem]] = {}
    for item in prepared.items:
        trained.setdefault(item.session, []).append(item)
    found = []
    for session, items in trained.items():
        credit = np.concatenate([item.credit[item.sample.mask] for item in items])
        if credit.mean(dtype=np.float64) > 0:
            oldest = min(int(item.sample.versions[item.sample.mask].min()) for item in items)
            reward = prepared.session_rewards[session]
            found.append(Success(items[0].sample.session_id, reward, oldest))
    return found


def _items(
    success: Success, advantage: float, session: int, load: Callable[[str], Episode]
) -> list[TrainItem]:
    """Return the session's branches as the step's ``session``-th; each replayed session is a group.

    The list is empty if the store no longer has the session.
    """
    try:
        episode = load(success.session_id)
    except NotFound:
        log.warning("session %s is not in the store any more: not replayed", success.session_id)
        return []
    return [
        TrainItem(
            sample,
            session,
            ("replay", success.session_id),
            np.full(len(sample.token_ids), advantage, np.float32),
        )
        for sample in (_as_trained(each, success) for each in episode.samples)
        if sample.mask.any() and sample.weight > 0
    ]


def _as_trained(sample: Sample, success: Success) -> Sample:
    """Return ``sample`` without the tokens that were too old when the session was trained."""
    return replace(sample, mask=sample.mask & (sample.versions >= success.version))
