"""The gradient that a trust region leaves of stale sessions, computed exactly.

Nothing is sampled here. All sessions of :data:`.tree.TREE` are weighted with their probability
under the sampler ``μ``, and the trainer's own loss gives the gradient. The policy is a *distance*
ahead of the sampler: so many nats were added to the logits of the right choices and taken from the
others'.

An advantage is either that of the whole session, ``R - E[R]``, as group estimators give it to each
token, or that of the choice: the mean of the first over the sessions that make this choice after
this history, less the mean over all sessions with this history. The two differ by noise whose mean
is 0. Without a region both therefore give the same gradient. ``clip`` drops a risen token if its
advantage is positive, so of a good choice that has risen it keeps the unlucky sessions:
``E[A 1(A < 0)] < 0`` though ``E[A] > 0``.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bridle.recipes.learning.gradients import tables
from bridle.recipes.learning.tree import Enumerated, enumerated
from bridle.trainer.config import LossConfig
from bridle.trainer.losses.losses import policy_loss
from bridle.trainer.losses.terms import TokenTerms
from bridle.trainer.losses.trust import outside_trust

DISTANCES: Final = (0.1, 0.2, 0.3, 0.5)
"""Distances of the policy from the sampler, in nats of a logit."""


@dataclass(frozen=True, slots=True)
class RegionFigures:
    """Cosines with the exact gradient at one distance from the sampler."""

    distance: float
    outside: float
    """The share of the tokens that ``clip`` leaves out with the session's advantage."""
    without: float
    """The cosine without a region, with the session's advantage."""
    by_session: float
    """The cosine with ``clip`` and the session's advantage."""
    by_choice: float
    """The cosine with ``clip`` and the choice's advantage. It is 0 if nothing is left."""


def bench_region(seed: int) -> list[RegionFigures]:
    """Return the figures of the default loss at each of :data:`DISTANCES`."""
    exact = enumerated()
    sampler = tables(exact, seed)["sampler"]
    ahead = exact.gradient(sampler, with_steps=False).view_as(sampler)
    signs = torch.where(ahead.abs() > 1e-9, ahead.sign(), 0.0)
    return [_figures(exact, sampler, signs, distance) for distance in DISTANCES]


def _figures(exact: Enumerated, sampler: Tensor, signs: Tensor, distance: float) -> RegionFigures:
    logits = sampler + distance * signs
    target = exact.gradient(logits, with_steps=False)
    by_session, by_choice = session_advantages(exact, sampler), choice_advantages(exact, sampler)

    def cosine(advantages: NDArray[np.float64], region: str) -> float:
        found = expected_gradient(exact, logits, sampler, advantages, region)
        length = float(found.norm() * target.norm())
        return float(found @ target) / length if length > 1e-12 else 0.0

    terms = _terms(exact, logits, sampler, by_session)
    outside = terms.weights[outside_trust(terms, LossConfig())].sum()
    return RegionFigures(
        distance,
        float(outside / terms.weights.sum()),
        cosine(by_session, "none"),
        cosine(by_session, "clip"),
        cosine(by_choice, "clip"),
    )


def session_advantages(exact: Enumerated, sampler: Tensor) -> NDArray[np.float64]:
    """Return the reward of each choice's session less the mean reward, ``float64[N, D]``."""
    mean = float((exact.probabilities(sampler).numpy() * exact.solved).sum())
    return np.broadcast_to((exact.solved - mean)[:, None], exact.rows.shape)


def choice_advantages(exact: Enumerated, sampler: Tensor) -> NDArray[np.float64]:
    """Return the sampler's advantage of each choice after its history, ``float64[N, D]``."""
    likely = exact.probabilities(sampler).numpy()
    rewards: dict[bytes, float] = defaultdict(float)
    masses: dict[bytes, float] = defaultdict(float)
    seen, chosen = _histories(exact)
    for keys in (seen, chosen):
        for number, of_session in enumerate(keys):
            for key in of_session:
                masses[key] += float(likely[number])
                rewards[key] += float(likely[number] * exact.solved[number])
    means = {key: rewards[key] / mass for key, mass in masses.items()}
    found = np.zeros(exact.rows.shape)
    for number, (before, after) in enumerate(zip(seen, chosen, strict=True)):
        found[number, : len(before)] = [
            means[b] - means[a] for a, b in zip(before, after, strict=True)
        ]
    return found


def _histories(exact: Enumerated) -> tuple[list[list[bytes]], list[list[bytes]]]:
    """Return keys of the history before each choice, its row included, and of that after it."""
    pairs = np.stack([exact.rows, exact.choices], 2)
    lengths = (exact.rows >= 0).sum(1)
    seen, chosen = [], []
    for pair, length in zip(pairs, lengths.tolist(), strict=True):
        flat = pair.ravel()
        seen.append([flat[: 2 * at + 1].tobytes() for at in range(length)])
        chosen.append([flat[: 2 * at + 2].tobytes() for at in range(length)])
    return seen, chosen


def expected_gradient(
    exact: Enumerated,
    logits: Tensor,
    sampler: Tensor,
    advantages: NDArray[np.float64],
    region: str,
) -> Tensor:
    """Return the mean direction of the default loss over the sampler's sessions.

    ``advantages`` is ``float64[N, D]``. The result is ``float64[rows * ways]``.
    """
    table = logits.detach().clone().requires_grad_()
    terms = _terms(exact, table, sampler, advantages)
    loss, _ = policy_loss(terms, LossConfig(trust_region=region))
    (found,) = torch.autograd.grad(-loss, table)
    return found.flatten()


def _terms(
    exact: Enumerated, logits: Tensor, sampler: Tensor, advantages: NDArray[np.float64]
) -> TokenTerms:
    """Return all choices of all sessions, weighted with the probability of their session."""
    sessions, places = np.nonzero(exact.rows >= 0)
    rows, choices = exact.rows[sessions, places], exact.choices[sessions, places]
    logprobs = logits.log_softmax(-1)[rows, choices]
    return TokenTerms(
        logprobs=logprobs,
        old_logprobs=logprobs.detach(),
        behaviour_logprobs=sampler.log_softmax(-1)[rows, choices],
        advantages=torch.from_numpy(advantages[sessions, places]),
        weights=exact.probabilities(sampler)[sessions],
        branches=torch.from_numpy(sessions),
    )
