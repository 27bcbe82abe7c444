"""A benchmark of groups of siblings on the sparse task of ten steps, with history in its prompts.

Ten places lie in a row before the goal. The sessions of a group begin at one of them, drawn at
random. In each of at most ten steps a session chooses one of eight ways, of which one leads on. The
only reward is 1 for reaching the goal. A prompt has all steps before it, so that no two steps have
the same prompt. The policy is a table with one row of logits for each place.

A share of the groups re-enters earlier sessions: the steps before the branch are taken from the
record, and cost no sampled token. The figure is the number of *sampled* tokens until the goal.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import mean, median
from time import perf_counter
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
from bridle.trainer.collection.branching import (
    BranchPoint,
    EndedSession,
    Where,
    chosen,
    in_order,
    is_branch,
)
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
SEEDS: Final = range(20, 25)
"""The seeds of the published figures. No setting was chosen on them."""
Step = tuple[int, int, float]
"""The place that is seen, the way that is chosen, and its logprob."""


@dataclass(frozen=True, slots=True)
class BranchSettings:
    farthest: int = PLACES
    """The largest distance from the goal at which a session can begin, in places."""
    goal: float = 0.9
    """The chance of success of a new session that a run must reach."""
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
    BranchCase("random", "siblings", 0.5),
    BranchCase("failed", "siblings", 0.5, "failed"),
    BranchCase("value", "siblings", 0.75, "value"),
    BranchCase("turn_values", "turn_values", 0.75, "value"),
)
"""The cases; where nothing else is said, the estimator of branched runs is ``siblings``."""


@dataclass(frozen=True, slots=True)
class BranchFigures:
    """The cost of a run until it reaches the goal."""

    steps: int
    """Number of training steps."""
    sessions: int
    tokens: int
    """Number of sampled tokens."""
    seconds: float


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


def until_goal(case: BranchCase, settings: BranchSettings, seed: int) -> BranchFigures | None:
    """Return the cost of one run until it reaches the goal, or ``None`` if it does not.

    The chance of success is computed from the table, so that the number of new sessions among a
    step's does not matter.
    """
    began = perf_counter()
    rng = np.random.default_rng(seed)
    right = rng.integers(0, WAYS, PLACES)
    policy = TablePolicy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.rate, weight_decay=0.0)
    groups: deque[list[_Played]] = deque(maxlen=RECENT)
    memory: dict[str, float] = {}
    sampled = number = 0
    for version in range(settings.most):
        scores = policy.logits.detach().log_softmax(-1).numpy()
        if _chance(scores, right, settings.farthest) >= settings.goal:
            seconds = perf_counter() - began
            return BranchFigures(version, number * settings.group_size, sampled, seconds)
        episodes = []
        for _ in range(settings.groups):
            branch = None
            if is_branch(number, case.share):
                branch = _branch(groups, case.where, rng)
            begun = _begun(f"{number}", settings, rng, branch)
            played = [_played(one, scores, right, rng) for one in begun]
            groups.append(played)
            episodes += [_episode(one, f"{number}", version) for one in played]
            sampled += sum(len(one.steps) - one.replayed for one in played)
            number += 1
        _train(policy, optimizer, episodes, version, case.config, memory)
    return None


def _chance(scores: NDArray[np.float32], right: NDArray[np.int64], farthest: int) -> float:
    """Return the chance that a new session reaches the goal."""
    on = np.exp(scores[np.arange(PLACES), right])
    reached = np.zeros(PLACES + 1)
    reached[PLACES] = 1.0
    for _ in range(STEPS):
        reached[:PLACES] = on * reached[1:] + (1 - on) * reached[:PLACES]
    return float(reached[PLACES - farthest : PLACES].mean())


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


def _branch(
    groups: Sequence[Sequence[_Played]], where: Where, rng: np.random.Generator
) -> tuple[_Played, int] | None:
    """Return one of the latest sessions, and the step at which siblings leave it.

    Both are chosen as in a run (:mod:`bridle.run.branching`).
    """
    sessions = {
        one.id: (one, EndedSession(one.id, one.reached, mean(each.reached for each in group)))
        for group in groups
        for one in group
    }
    for ended in in_order([ended for _, ended in sessions.values()], where, rng):
        one, _ = sessions[ended.id]
        count = len(one.steps)
        points = [
            BranchPoint(
                f"{at}",
                -one.steps[at][2],
                ended.chance(at - one.replayed, count - one.replayed),
                count - at,
            )
            for at in range(max(1, one.replayed), count)
        ]
        if (point := chosen(points, where, rng)) is not None:
            return one, int(point.call_id)
    return None


def _begun(
    name: str,
    settings: BranchSettings,
    rng: np.random.Generator,
    branch: tuple[_Played, int] | None,
) -> list[_Played]:
    """Return the sessions of a group before their first own step."""
    if branch is None:
        start = PLACES - 1 - int(rng.integers(settings.farthest))
        return [
            _Played(f"{name}-{member}", start, [], 0, False)
            for member in range(settings.group_size)
        ]
    origin, at = branch
    call = origin.id, f"{origin.id}/{at}"
    return [
        _Played(f"{name}-{member}", origin.start, origin.steps[:at], at, False, call)
        for member in range(settings.group_size)
    ]


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


def main(names: Sequence[str]) -> None:
    """Print the figures of each case by seed, and its tokens as a share of the first case's."""
    baseline: list[float] = []
    for case in CASES:
        if names and case.name not in names:
            continue
        tokens: list[float] = []
        for seed in SEEDS:
            figures = until_goal(case, BranchSettings(), seed)
            print(f"{case.name}, seed {seed}: {figures}", flush=True)
            tokens.append(inf if figures is None else figures.tokens)
        baseline = baseline or tokens
        print(
            f"{case.name}: tokens {tokens}, {mean(tokens) / mean(baseline):.2f} of the mean and "
            f"{median(tokens) / median(baseline):.2f} of the median of the first case",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
