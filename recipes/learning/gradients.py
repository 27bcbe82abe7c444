"""Gradients of the methods over one recorded store, beside the exactly enumerated one.

A method's gradient is computed from batches of the store's sessions, by the trainer's own parts. It
is compared at three *points*:

===========  =====================================================================================
``sampler``  the policy is the sampler, and it is the first update: ``π = π_old = μ``
``lag``      the sampler is three updates older: ``π = π_old``, and ``μ`` is another policy
``update``   the third update of a step: ``π_old = μ``, and ``π`` is two updates ahead
===========  =====================================================================================

``g`` is the gradient of a batch, and ``g*`` the exact one at the same point. The figures are
``cos(E[g], g*)``; ``bias = |E[g] - g*| / |g*|`` with its standard error; ``variance =
E|g - E[g]|² / |E[g]|²``; and ``length = E[g]·g* / |g*|²``. Constant factors of a gradient change
bias and length, and neither cosine nor variance; AdamW does not see them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from bridle.recipes.learning.method import Method
from bridle.recipes.learning.methods import METHODS, PLAIN
from bridle.recipes.learning.tree import TREE, Enumerated, enumerated, record, recorded
from bridle.recipes.learning.world import TablePolicy
from bridle.reconstruct.samples.sample import Episode
from bridle.trainer.batch.prepare import prepare
from bridle.trainer.config import GrpoConfig
from bridle.trainer.learner.batches import TrainPack, loss_terms, pack_minibatch
from bridle.trainer.losses.losses import policy_loss

POINTS: Final = ("sampler", "lag", "update")


@dataclass(frozen=True, slots=True)
class GradientSettings:
    sessions: int = 2048
    """Number of sessions in the store."""
    group_size: int = 8
    groups: int = 4
    """Number of groups in a batch."""
    seed: int = 0

    @property
    def batch(self) -> int:
        return self.groups * self.group_size


@dataclass(frozen=True, slots=True)
class GradientFigures:
    """The comparison of a method's gradient with the exact one at a point."""

    cosine: float
    bias: float
    bias_error: float
    """The standard error of ``bias``."""
    variance: float
    length: float

    @classmethod
    def of(cls, gradients: Tensor, exact: Tensor) -> GradientFigures:
        """Compare ``float64[N, D]``, the gradients of ``N`` batches, with ``float64[D]``."""
        mean = gradients.mean(0)
        unit, own = float(exact.norm()), max(float(mean.norm()), 1e-300)
        spread = float((gradients - mean).square().sum(1).mean())
        return cls(
            cosine=float(mean @ exact) / (unit * own),
            bias=float((mean - exact).norm()) / unit,
            bias_error=float(np.sqrt(spread / len(gradients))) / unit,
            variance=spread / own**2,
            length=float(mean @ exact) / unit**2,
        )


@dataclass(frozen=True, slots=True)
class Compared:
    """A method with its figures by point; none if it is not compared."""

    method: Method
    figures: dict[str, GradientFigures]

    def as_data(self) -> dict[str, Any]:
        stated = asdict(self.method)
        names = ("name", "part", "source", "assumes", "use", "not_compared")
        figures = {point: asdict(one) for point, one in self.figures.items()}
        return {**{name: stated[name] for name in names}, "figures": figures}


def tables(exact: Enumerated, seed: int) -> dict[str, Tensor]:
    """Return the table of logits in training at each point; that of ``sampler`` is the sampler's.

    The others are some updates of AdamW at a rate of 0.1 ahead, along the signs of the exact
    gradient, with noise.
    """
    rng = np.random.default_rng(seed)
    shape = (TREE.rows, TREE.ways)
    sampler = torch.from_numpy(rng.normal(0.0, 0.5, shape))
    ahead = exact.gradient(sampler, with_steps=False).view(shape)
    signs = torch.where(ahead.abs() > 1e-9, ahead.sign(), 0.0)
    noise = torch.from_numpy(rng.normal(0.0, 0.1, shape))
    return {
        "sampler": sampler,
        "lag": sampler + 0.3 * signs + noise,
        "update": sampler + 0.2 * signs + noise,
    }


def bench_gradients(
    settings: GradientSettings,
    methods: Sequence[Method] = METHODS,
    report: Callable[[str], None] = lambda _: None,
) -> list[Compared]:
    """Record a store, and compare the gradient of each method over it with the exact one."""
    exact = enumerated()
    trained = tables(exact, settings.seed)
    with TemporaryDirectory(prefix="bridle-gradients-") as folder:
        store = Path(folder) / "tree.db"
        report(f"recording {settings.sessions} sessions")
        record(store, trained["sampler"], settings.sessions, settings.group_size, settings.seed)
        sessions = recorded(store)
    batches = [
        sessions[start : start + settings.batch]
        for start in range(0, len(sessions), settings.batch)
    ]
    found = []
    for one in methods:
        report(one.name)
        figures = {} if one.not_compared else _figures(one, batches, exact, trained)
        found.append(Compared(one, figures))
    return found


def _figures(
    method: Method,
    batches: Sequence[Sequence[Episode]],
    exact: Enumerated,
    trained: Mapping[str, Tensor],
) -> dict[str, GradientFigures]:
    config = method.configured(GrpoConfig() if method.whole else PLAIN)
    memory: dict[str, float] = {}
    found: dict[str, list[Tensor]] = {point: [] for point in POINTS}
    for batch in batches:
        prepared = prepare(batch, 0, config, memory)
        packs = pack_minibatch(prepared.items, config) if prepared.items else []
        old = [replace(pack, old_logprobs=pack.behaviour_logprobs) for pack in packs]
        for point, logits in trained.items():
            own = old if point == "update" else packs
            found[point].append(gradient(logits, own, config))
    return {
        point: GradientFigures.of(
            torch.stack(gradients), exact.gradient(trained[point], with_steps=method.steps)
        )
        for point, gradients in found.items()
    }


def gradient(logits: Tensor, packs: Sequence[TrainPack], config: GrpoConfig) -> Tensor:
    """Return the direction in which a batch moves a table of logits, ``float64[rows * ways]``."""
    policy = TablePolicy(TREE, torch.float64)
    policy.load_state_dict({"logits": logits})
    found = torch.zeros_like(policy.logits)
    for pack in packs:
        loss, _ = policy_loss(loss_terms(pack, policy(pack.pack)), config.loss)
        (own,) = torch.autograd.grad(loss, policy.logits)
        found -= own
    return found.flatten()
