"""Training runs in a :class:`.world.World`, and the sessions that each needs to reach the goal.

Credit, filters, losses and corrections are the trainer's own, from
:func:`bridle.trainer.batch.prepare.prepare` to the loss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf, isinf
from statistics import fmean, median
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from bridle.recipes.learning.methods import method
from bridle.recipes.learning.scenarios import EXPECTATIONS, Expectation
from bridle.recipes.learning.world import (
    Played,
    TablePolicy,
    World,
    engine_scores,
    episode,
    hinted_gaps,
    play,
)
from bridle.reconstruct.samples.sample import Episode
from bridle.trainer.batch.prepare import TrainItem, prepare
from bridle.trainer.config import GrpoConfig
from bridle.trainer.learner.batches import TrainPack, deal_minibatches, loss_terms, pack_minibatch
from bridle.trainer.losses.losses import policy_loss


@dataclass(frozen=True, slots=True)
class LearningSettings:
    goal: float = 0.9
    """The share of sessions that reach the goal, or of right ways in a quiz, that ends a run."""
    window: int = 3
    """Number of steps over which the share is taken."""
    seeds: int = 10
    first_seed: int = 0

    @property
    def every_seed(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)


@dataclass(frozen=True, slots=True)
class LearningFigures:
    """The sessions that a method needs in a scenario."""

    scenario: str
    name: str
    sessions: float | None
    """The median number of sessions until the goal over the seeds, or ``None`` if half of the seeds
    have not reached it."""
    by_seed: list[int | None]
    """Number of sessions until the goal for each seed, or ``None`` if the seed has not reached
    it."""
    ratio: float | None
    """The number of sessions divided by that of the first method of the scenario."""
    differs: bool
    """True if a seed needs another number of sessions than with the first method."""

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Judged:
    """An expectation beside the ratio that was measured."""

    expectation: Expectation
    ratio: float | None
    met: bool

    def as_data(self) -> dict[str, Any]:
        return {**asdict(self.expectation), "ratio": self.ratio, "met": self.met}


SETTINGS: Final = LearningSettings()
CHOICE: Final = 5
"""Number of seeds, after those that are measured, on which a method's rate is chosen."""


def bench_learning(
    world: World, names: Sequence[str], settings: LearningSettings, report: Callable[[str], None]
) -> list[LearningFigures]:
    """Train each method in a scenario once per seed, and compare them with the first."""
    needed: dict[str, list[int | None]] = {}
    for name in names:
        report(f"{world.name}: {name}")
        config = method(name).configured(GrpoConfig())
        own = replace(world, rate=best_rate(world, config, settings))
        needed[name] = [
            sessions_to_goal(own, config, seed, settings) for seed in settings.every_seed
        ]
    return compared(world.name, needed)


def best_rate(world: World, config: GrpoConfig, settings: LearningSettings) -> float:
    """Return the rate at which a method needs the fewest sessions, in the median of other seeds.

    It is one of ``world.rates``, or ``world.rate`` if there are none.
    """
    first = settings.first_seed + settings.seeds
    choice = range(first, first + CHOICE)

    def needed(rate: float) -> float:
        one = replace(world, rate=rate)
        found = [sessions_to_goal(one, config, seed, settings) for seed in choice]
        return inf if (middle := _median(found)) is None else middle

    return min(world.rates, key=needed) if world.rates else world.rate


def compared(scenario: str, needed: Mapping[str, Sequence[int | None]]) -> list[LearningFigures]:
    """Compare each method's sessions with those of the first one, by medians.

    Medians are used because now and then a run forgets a place for good, and takes several times
    as long as the others.
    """
    first = next(iter(needed.values()))
    middle = _median(first)
    found = []
    for name, by_seed in needed.items():
        sessions = _median(by_seed)
        ratio = sessions / middle if sessions is not None and middle else None
        differs = [*by_seed] != [*first]
        found.append(LearningFigures(scenario, name, sessions, [*by_seed], ratio, differs))
    return found


def _median(by_seed: Sequence[int | None]) -> float | None:
    found = median(inf if each is None else each for each in by_seed)
    return None if isinf(found) else found


def judged(
    found: Sequence[LearningFigures], expectations: Sequence[Expectation] = EXPECTATIONS
) -> list[Judged]:
    """Judge the expectations whose methods were both run."""
    by_place = {(one.scenario, one.name): one for one in found}
    results = []
    for one in expectations:
        own = by_place.get((one.scenario, one.method))
        other = by_place.get((one.scenario, one.against))
        if own is None or other is None:
            continue
        ratio = None
        if own.sessions is not None:
            ratio = own.sessions / other.sessions if other.sessions else 0.0
        results.append(Judged(one, ratio, one.met(ratio)))
    return results


def rows(found: Sequence[LearningFigures], settings: LearningSettings) -> list[str]:
    """Return the lines of a table of methods, the first of which the others are compared with."""
    lines = [
        f"| method | sessions until {settings.goal:.0%} of them reach the goal | by seed | "
        "of the first's |",
        "| --- | ---: | ---: | ---: |",
    ]
    for each in found:
        sessions = "not reached" if each.sessions is None else f"{each.sessions:.0f}"
        ratio = "" if each.ratio is None else f"{each.ratio:.2f}"
        seeds = ", ".join("not reached" if one is None else str(one) for one in each.by_seed)
        lines.append(f"| {each.name} | {sessions} | {seeds} | {ratio} |")
    return lines


def sessions_to_goal(
    world: World, config: GrpoConfig, seed: int, settings: LearningSettings = SETTINGS
) -> int | None:
    """Return the number of sessions until one run reaches the goal, or ``None`` if it does not."""
    rng = np.random.default_rng(seed)
    right = rng.integers(0, world.ways, world.rows)
    policy = TablePolicy(world)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=world.rate, weight_decay=0.0)
    config = replace(
        config, minibatches=world.minibatches, epochs=world.epochs, max_staleness=world.lag
    )
    tables: deque[Tensor] = deque(maxlen=world.lag + 1)
    recent: deque[float] = deque(maxlen=settings.window)
    memory: dict[str, float] = {}
    teacher = partial(hinted_gaps, world, right) if config.distillation.teaches else None
    for version in range(world.most):
        tables.append(policy.logits.detach().clone())
        drawn_at = version - (len(tables) - 1)
        scores = engine_scores(world, tables[0], rng)
        played = play(world, scores, right, world.groups * world.group_size, rng)
        recent.append(fmean(one.right() if world.quiz else one.solved for one in played))
        if len(recent) == settings.window and fmean(recent) >= settings.goal:
            return (version + 1) * len(played)
        prepared = prepare(
            episodes_of(world, played, version, drawn_at, config),
            version,
            config,
            memory,
            teacher,
        )
        update(policy, optimizer, prepared.items, config, version)
    return None


def episodes_of(
    world: World, played: list[Played], version: int, drawn_at: int, config: GrpoConfig
) -> list[Episode]:
    """Return sessions that were played one after another, as groups of the world's size."""
    return [
        episode(
            world,
            f"{version}-{number}",
            f"{version}-{number // world.group_size}",
            one,
            drawn_at,
            config.samples.kinds,
        )
        for number, one in enumerate(played)
    ]


def update(
    policy: TablePolicy,
    optimizer: torch.optim.Optimizer,
    items: tuple[TrainItem, ...],
    config: GrpoConfig,
    version: int,
) -> None:
    """Take the updates of one step, as :func:`bridle.trainer.learner.update.update_policy` does."""
    if not items:
        return
    dealt = deal_minibatches(items, config.minibatches, (config.seed, version))
    packed = [pack_minibatch(part, config) for part in dealt]
    if len(packed) * config.epochs > 1:
        packed = [[with_old(policy, pack) for pack in packs] for packs in packed]
    for _ in range(config.epochs):
        for packs in packed:
            optimizer.zero_grad()
            for pack in packs:
                loss, _ = policy_loss(loss_terms(pack, policy(pack.pack)), config.loss)
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()


@torch.no_grad()
def with_old(policy: TablePolicy, pack: TrainPack) -> TrainPack:
    """Return the pack with the policy's present logprobs, as those of ``π_old``."""
    return replace(pack, old_logprobs=policy(pack.pack).logprobs.float())
