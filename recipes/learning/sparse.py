"""A benchmark of estimators, losses and settings that learn a sparse task of ten steps.

It counts the sessions that each needs.

The task is made by rule. Ten places lie in a row before the goal, and a session begins at one of
them, drawn at random. In each of at most ten steps it sees its place and chooses one of eight ways.
One of them, which differs from place to place, leads on; the others stay. The only reward is 1 for
a session that reaches the goal, which ends it.

So most of a reward is luck: random steps reach the goal from the last place in three sessions of
four, and from the first place in one of a thousand million. An estimator with one credit for a
whole session compares sessions that began at different places, and gives every step of a lucky
session the same credit, though most of its steps were wrong. Places recur within a session and
among the sessions of a group, so that a step can be compared with others at its place.

The policy is a table of logits, one row for each place, so that only credit, filters, losses and
corrections are measured. Those are the trainer's own, from
:func:`bridle.trainer.batch.prepare.prepare` to the loss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, isinf
from statistics import mean, median
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bridle.reconstruct.samples.sample import Conservation, Episode, Sample
from bridle.store.records import CallKind, SessionRecord
from bridle.store.reward import Reward, RewardSource
from bridle.trainer.batch.packing import Pack
from bridle.trainer.batch.prepare import prepare
from bridle.trainer.config import AdvantageConfig, GrpoConfig, LossConfig
from bridle.trainer.learner.batches import loss_terms, pack_minibatch
from bridle.trainer.losses.losses import policy_loss
from bridle.trainer.policy.model import TokenScores

STEPS: Final = 10
"""The largest number of steps in a session."""
WAYS: Final = 8
PLACES: Final = 10
"""Number of places before the goal. A place is its own token id; the ways have the ids that
follow."""


@dataclass(frozen=True, slots=True)
class LearningSettings:
    farthest: int = PLACES
    """The largest distance from the goal at which a session can begin, in places."""
    goal: float = 0.9
    """The mean reward over the last ``window`` steps that a run must reach."""
    window: int = 3
    groups: int = 4
    group_size: int = 16
    rate: float = 0.1
    seeds: int = 3
    first_seed: int = 0
    most: int = 400
    """Number of steps after which a run counts as not having reached the goal."""

    @property
    def every_seed(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)


@dataclass(frozen=True, slots=True)
class Case:
    """One measured case: how a run differs from the default."""

    name: str
    config: GrpoConfig
    lag: int = 0
    """Number of versions by which the sampling policy is older than the trained one."""
    two_roles: bool = False
    """Whether a planner and a worker take the steps in turn."""


@dataclass(frozen=True, slots=True)
class LearningFigures:
    name: str
    sessions: float | None
    """The median number of sessions until the goal over the seeds, or ``None`` if half of the seeds
    have not reached it."""
    by_seed: list[int | None]
    """Number of sessions until the goal for each seed, or ``None`` if the seed has not reached
    it."""
    ratio: float | None
    """The number of sessions divided by that of the default case."""

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


def cases() -> list[Case]:
    """Return the cases of the table; the first is the default."""
    default = GrpoConfig()

    def credit(name: str, **options: Any) -> GrpoConfig:
        stated = AdvantageConfig(name, options={name: options})
        return replace(default, advantages=stated)

    def loss(**settings: Any) -> GrpoConfig:
        return replace(default, loss=LossConfig(**settings))

    return [
        Case("grpo", default),
        Case("leave_one_out", credit("leave_one_out")),
        Case("mean", credit("mean")),
        Case("gated", credit("gated")),
        Case("spiral", credit("spiral")),
        Case("gigpo", credit("gigpo", discount=0.95)),
        Case("gigpo, step_weight 4", credit("gigpo", discount=0.95, step_weight=4.0)),
        Case("turn_returns", credit("turn_returns", discount=0.95)),
        Case("gspo", loss(name="gspo", clip_low=3e-4, clip_high=4e-4)),
        Case("cispo", loss(name="cispo")),
        Case("importance mask", loss(importance="mask")),
        Case("importance sequence", loss(importance="sequence")),
        Case("importance none", loss(importance="none")),
        Case("weighting token", loss(weighting="token")),
        Case("weighting constant", loss(weighting="constant", constant_tokens=STEPS)),
        Case("max_staleness 2", replace(default, max_staleness=2), lag=2),
        Case("two roles", default, two_roles=True),
        Case("two roles, per_role", credit("per_role"), two_roles=True),
    ]


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


def bench_learning(case: Case, settings: LearningSettings) -> list[int | None]:
    """Return the number of sessions until the goal by seed.

    It is ``None`` for a seed that does not reach the goal.
    """
    return [sessions_to_goal(case, settings, seed) for seed in settings.every_seed]


def compared(needed: Mapping[str, Sequence[int | None]]) -> list[LearningFigures]:
    """Compare each case's sessions with those of the first case, by medians.

    Medians are used because now and then a run forgets a place for good, and takes several times
    as long as the others.
    """
    default = _median(next(iter(needed.values())))
    found = []
    for name, by_seed in needed.items():
        sessions = _median(by_seed)
        ratio = sessions / default if sessions is not None and default else None
        found.append(LearningFigures(name, sessions, [*by_seed], ratio))
    return found


def _median(by_seed: Sequence[int | None]) -> float | None:
    found = median(inf if each is None else each for each in by_seed)
    return None if isinf(found) else found


def sessions_to_goal(case: Case, settings: LearningSettings, seed: int) -> int | None:
    """Return the number of sessions until one run reaches the goal, or ``None`` if it does not."""
    rng = np.random.default_rng(seed)
    right = rng.integers(0, WAYS, PLACES)
    policy = TablePolicy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.rate, weight_decay=0.0)
    tables: deque[Tensor] = deque(maxlen=case.lag + 1)
    recent: deque[float] = deque(maxlen=settings.window)
    memory: dict[str, float] = {}
    for version in range(settings.most):
        tables.append(policy.logits.detach().clone())
        drawn_at = version - (len(tables) - 1)
        episodes = [
            episode
            for group in range(settings.groups)
            for episode in _group(
                f"{version}-{group}", tables[0], drawn_at, right, case, settings, rng
            )
        ]
        recent.append(mean(each.rewards[0].value for each in episodes))
        if len(recent) == settings.window and mean(recent) >= settings.goal:
            return (version + 1) * settings.groups * settings.group_size
        prepared = prepare(episodes, version, case.config, memory)
        if not prepared.items:
            continue
        optimizer.zero_grad()
        for pack in pack_minibatch(prepared.items, case.config):
            loss, _ = policy_loss(loss_terms(pack, policy(pack.pack)), case.config.loss)
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return None


def _group(
    name: str,
    logits: Tensor,
    version: int,
    right: NDArray[np.int64],
    case: Case,
    settings: LearningSettings,
    rng: np.random.Generator,
) -> list[Episode]:
    """Play the sessions of one group. Every step is a call of its own."""
    scores = logits.log_softmax(-1).numpy()
    places = PLACES - 1 - rng.integers(0, settings.farthest, settings.group_size)
    steps: list[list[tuple[int, int, float]]] = [[] for _ in places]
    for _ in range(STEPS):
        # Gumbel's trick: the largest of logits and noise is drawn as the logits say.
        seen = np.minimum(places, PLACES - 1)
        ways = (scores[seen] + rng.gumbel(size=(len(seen), WAYS))).argmax(1)
        walking = places < PLACES
        for member in np.flatnonzero(walking):
            place, way = int(places[member]), int(ways[member])
            steps[member].append((place, way, float(scores[place, way])))
        places = places + (walking & (ways == right[seen]))
    return [
        _episode(
            f"{name}-{member}",
            name,
            steps[member],
            float(places[member] == PLACES),
            version,
            case.two_roles,
        )
        for member in range(settings.group_size)
    ]


def _episode(
    session: str,
    group: str,
    steps: list[tuple[int, int, float]],
    reward: float,
    version: int,
    two_roles: bool,
) -> Episode:
    samples = tuple(
        Sample(
            session_id=session,
            leaf_call_id=f"{session}/{number}",
            kind=CallKind.MAIN,
            role=("planner", "worker")[number % 2] if two_roles else None,
            token_ids=np.asarray([seen, PLACES + way], np.uint32),
            mask=np.asarray([False, True]),
            logprobs=np.asarray([0.0, logprob], np.float32),
            versions=np.asarray([-1, version]),
            calls=np.asarray([-1, 0], np.int32),
            call_ids=(f"{session}/{number}",),
            weight=1 / len(steps),
        )
        for number, (seen, way, logprob) in enumerate(steps)
    )
    return Episode(
        SessionRecord(session, 0.0, group_id=group, outcome="completed"),
        samples,
        (Reward(session, "reward", reward, 0.0, source=RewardSource.VERIFIER),),
        Conservation(captured=len(steps), trained=len(steps)),
    )


def rows(found: Sequence[LearningFigures], settings: LearningSettings) -> list[str]:
    """Return the lines of the cases' own table."""
    lines = [
        f"| case | sessions until {settings.goal:.0%} of them reach the goal | by seed | "
        "of the default's |",
        "| --- | ---: | ---: | ---: |",
    ]
    for each in found:
        sessions = "not reached" if each.sessions is None else f"{each.sessions:.0f}"
        ratio = "" if each.ratio is None else f"{each.ratio:.2f}"
        seeds = ", ".join("not reached" if one is None else str(one) for one in each.by_seed)
        lines.append(f"| {each.name} | {sessions} | {seeds} | {ratio} |")
    return lines
