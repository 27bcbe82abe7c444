"""A benchmark of groups of siblings on the sparse task of ten steps, with history in its prompts.

Ten places lie in a row before the goal, and a session begins at one of them, drawn at random. In
each of at most ten steps it chooses one of eight ways, of which one leads on. The only reward is 1
for reaching the goal. A prompt has all steps before it, so that no two steps have the same prompt.
The policy is a table with one row of logits for each place.

A share of the groups re-enters earlier sessions: the steps before the branch are taken from the
record, and cost no sampled token. The figure is the number of *sampled* tokens until the goal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from bridle.reconstruct.samples.sample import Conservation, Episode, Sample
from bridle.store.records import CallKind, SessionRecord
from bridle.store.reward import Reward, RewardSource
from bridle.trainer.batch.packing import Pack
from bridle.trainer.batch.prepare import prepare
from bridle.trainer.collection.branching import BranchPoint, Where, chosen, is_branch
from bridle.trainer.config import AdvantageConfig, GrpoConfig
from bridle.trainer.learner.batches import loss_terms, pack_minibatch
from bridle.trainer.losses.losses import policy_loss
from bridle.trainer.policy.model import TokenScores

STEPS: Final = 10
"""The largest number of steps in a session."""
WAYS: Final = 8
PLACES: Final = 10
"""Number of places before the goal. A place is its own token id; the ways have the ids that
follow."""
RECENT: Final = 8
"""Number of latest groups whose sessions can be re-entered."""
Step = tuple[int, int, float]
"""The place that is seen, the way that is chosen, and its logprob."""


@dataclass(frozen=True, slots=True)
class BranchSettings:
    farthest: int = PLACES
    """The largest distance from the goal at which a session can begin, in places."""
    goal: float = 0.9
    """The mean reward over the last ``window`` steps that a run must reach."""
    window: int = 3
    groups: int = 4
    group_size: int = 16
    rate: float = 0.1
    most: int = 800
    """Number of steps after which a run counts as not having reached the goal."""


class TablePolicy(nn.Module):
    """A policy with one row of logits for each place."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(PLACES, WAYS))

    def forward(self, pack: Pack) -> TokenScores:
        seen = torch.from_numpy(pack.token_ids[pack.sources])
        ways = torch.from_numpy(pack.targets) - PLACES
        scores = self.logits[seen].log_softmax(-1)
        entropies = torch.special.entr(scores.detach().exp()).sum(-1)
        return TokenScores(scores.gather(1, ways[:, None]).squeeze(1), entropies)


@dataclass(frozen=True, slots=True)
class BranchCase:
    """One measured case."""

    name: str
    baseline: str = "grpo"
    share: float = 0.0
    """The share of groups that are siblings."""
    where: Where = "random"

    @property
    def config(self) -> GrpoConfig:
        return replace(GrpoConfig(), advantages=AdvantageConfig(self.baseline))


CASES: Final = (
    BranchCase("grpo"),
    BranchCase("siblings, branch_at failed", "siblings", 0.5, "failed"),
    BranchCase("siblings, branch_at random", "siblings", 0.5, "random"),
    BranchCase("siblings, branch_at entropy", "siblings", 0.5, "entropy"),
    BranchCase("siblings, branch_at value", "siblings", 0.5, "value"),
    BranchCase("turn_values, branch_at failed", "turn_values", 0.5, "failed"),
)


@dataclass(slots=True)
class _Played:
    """A session of the task."""

    id: str
    start: int
    steps: list[Step]
    replayed: int
    """Number of its first steps that come from the record."""
    reached: bool
    origin: tuple[str, str] | None = None


def tokens_to_goal(case: BranchCase, settings: BranchSettings, seed: int) -> int | None:
    """Return the sampled tokens until one run reaches the goal, or ``None`` if it does not.

    The goal is measured on sessions from the beginning alone.
    """
    rng = np.random.default_rng(seed)
    right = rng.integers(0, WAYS, PLACES)
    policy = TablePolicy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.rate, weight_decay=0.0)
    recent: deque[float] = deque(maxlen=settings.window)
    groups: deque[list[_Played]] = deque(maxlen=RECENT)
    memory: dict[str, float] = {}
    sampled = number = 0
    for version in range(settings.most):
        scores = policy.logits.detach().log_softmax(-1).numpy()
        episodes, fresh = [], []
        for _ in range(settings.groups):
            point = None
            if is_branch(number, case.share):
                point = chosen(_points(groups), case.where, rng)
            played = _group(f"{number}", scores, right, settings, rng, groups, point)
            if point is None:
                fresh += played
            groups.append(played)
            episodes += [_episode(one, f"{number}", version) for one in played]
            sampled += sum(len(one.steps) - one.replayed for one in played)
            number += 1
        if fresh:
            recent.append(mean(one.reached for one in fresh))
        if len(recent) == settings.window and mean(recent) >= settings.goal:
            return sampled
        _train(policy, optimizer, episodes, version, case.config, memory)
    return None


def _train(
    policy: TablePolicy,
    optimizer: torch.optim.Optimizer,
    episodes: Sequence[Episode],
    version: int,
    config: GrpoConfig,
    memory: dict[str, float],
) -> None:
    prepared = prepare(episodes, version, config, memory)
    if not prepared.items:
        return
    optimizer.zero_grad()
    for pack in pack_minibatch(prepared.items, config):
        loss, _ = policy_loss(loss_terms(pack, policy(pack.pack)), config.loss)
        loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _points(groups: Sequence[Sequence[_Played]]) -> list[BranchPoint]:
    """Return the calls at which the latest sessions can be re-entered."""
    tried: dict[str, list[bool]] = {}
    for group in groups:
        for one in group:
            if one.origin is not None:
                tried.setdefault(one.origin[1], []).append(one.reached)
    return [
        BranchPoint(
            one.id,
            call := f"{one.id}/{at}",
            -one.steps[at][2],
            one.reached,
            sum(tried.get(call, ())),
            len(tried.get(call, ())),
        )
        for group in groups
        for one in group
        for at in range(max(1, one.replayed), len(one.steps))
    ]


def _group(
    name: str,
    scores: NDArray[np.float32],
    right: NDArray[np.int64],
    settings: BranchSettings,
    rng: np.random.Generator,
    groups: Sequence[Sequence[_Played]],
    point: BranchPoint | None,
) -> list[_Played]:
    if point is None:
        starts = PLACES - 1 - rng.integers(0, settings.farthest, settings.group_size)
        fresh = [
            _Played(f"{name}-{member}", int(start), [], 0, False)
            for member, start in enumerate(starts)
        ]
        return [_played(one, scores, right, rng) for one in fresh]
    origin = next(one for group in groups for one in group if one.id == point.session_id)
    at = int(point.call_id.rpartition("/")[2])
    branch = point.session_id, point.call_id
    siblings = [
        _Played(f"{name}-{member}", origin.start, origin.steps[:at], at, False, branch)
        for member in range(settings.group_size)
    ]
    return [_played(one, scores, right, rng) for one in siblings]


def _played(
    session: _Played,
    scores: NDArray[np.float32],
    right: NDArray[np.int64],
    rng: np.random.Generator,
) -> _Played:
    """Play a session to its end."""
    steps = list(session.steps)
    place = session.start
    for seen, way, _ in steps:
        place = seen + int(way == right[seen])
    while place < PLACES and len(steps) < STEPS:
        way = int((scores[place] + rng.gumbel(size=WAYS)).argmax())
        steps.append((place, way, float(scores[place, way])))
        place += int(way == right[place])
    session.steps, session.reached = steps, place == PLACES
    return session


def _episode(played: _Played, group: str, version: int) -> Episode:
    count = len(played.steps)
    mask = np.zeros(2 * count, bool)
    mask[2 * played.replayed + 1 :: 2] = True
    calls = np.full(2 * count, -1, np.int32)
    calls[1::2] = np.arange(count)
    logprobs = np.zeros(2 * count, np.float32)
    logprobs[1::2] = [logprob for _, _, logprob in played.steps]
    sample = Sample(
        session_id=played.id,
        leaf_call_id=f"{played.id}/{count - 1}",
        kind=CallKind.MAIN,
        role=None,
        token_ids=np.asarray(
            [token for seen, way, _ in played.steps for token in (seen, PLACES + way)], np.uint32
        ),
        mask=mask,
        logprobs=logprobs,
        versions=np.where(mask, version, -1),
        calls=calls,
        call_ids=tuple(f"{played.id}/{at}" for at in range(count)),
        weight=1.0,
    )
    session, call = played.origin or (None, None)
    sampled = count - played.replayed
    return Episode(
        SessionRecord(
            played.id,
            0.0,
            group_id=group,
            outcome="completed",
            origin_session_id=session,
            origin_call_id=call,
        ),
        (sample,),
        (Reward(played.id, "reward", float(played.reached), 0.0, source=RewardSource.VERIFIER),),
        Conservation(captured=sampled, trained=sampled),
    )


if __name__ == "__main__":
    for each in CASES:
        print(each.name, [tokens_to_goal(each, BranchSettings(), seed) for seed in range(5, 10)])
