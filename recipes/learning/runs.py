"""Training runs in a :class:`.world.World`, and the sessions that each needs to reach the goal.

Credit, filters, losses and corrections are the trainer's own, from
:func:`bridle.trainer.batch.prepare.prepare` to the loss.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import fmean
from typing import Final

import numpy as np
import torch
from torch import Tensor

from bridle.recipes.learning.world import Played, TablePolicy, World, engine_scores, episode, play
from bridle.reconstruct.samples.sample import Episode
from bridle.trainer.batch.prepare import TrainItem, prepare
from bridle.trainer.config import GrpoConfig
from bridle.trainer.learner.batches import TrainPack, deal_minibatches, loss_terms, pack_minibatch
from bridle.trainer.losses.losses import policy_loss

GOAL: Final = 0.9
"""The share of sessions that reach the goal, or of right ways in a quiz, that ends a run."""
WINDOW: Final = 3
"""Number of steps over which the share is taken."""


def sessions_to_goal(world: World, config: GrpoConfig, seed: int) -> int | None:
    """Return the number of sessions until one run reaches the goal, or ``None`` if it does not."""
    rng = np.random.default_rng(seed)
    right = rng.integers(0, world.ways, world.rows)
    policy = TablePolicy(world)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=world.rate, weight_decay=0.0)
    config = replace(
        config, minibatches=world.minibatches, epochs=world.epochs, max_staleness=world.lag
    )
    tables: deque[Tensor] = deque(maxlen=world.lag + 1)
    recent: deque[float] = deque(maxlen=WINDOW)
    memory: dict[str, float] = {}
    for version in range(world.most):
        tables.append(policy.logits.detach().clone())
        drawn_at = version - (len(tables) - 1)
        scores = engine_scores(world, tables[0], rng)
        played = play(world, scores, right, world.groups * world.group_size, rng)
        recent.append(fmean(one.right() if world.quiz else one.solved for one in played))
        if len(recent) == WINDOW and fmean(recent) >= GOAL:
            return (version + 1) * len(played)
        prepared = prepare(
            episodes_of(world, played, version, drawn_at, config), version, config, memory
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
