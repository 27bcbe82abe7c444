"""The report of a GRPO step: a value for programs, and flat named numbers for the metric sinks.

The names are declared in :mod:`bridle.store.diagnostics`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from bridle.store.records import PolicyRecord
from bridle.trainer.batch.prepare import PreparedStep
from bridle.trainer.collection.mixture import Mixed
from bridle.trainer.collection.replay import Replay
from bridle.trainer.learner.update import UpdateStats

_NAMED: Final = frozenset(
    {"tokens", "loss", "clipped", "importance", "importance_squares", "outside"}
)
"""Sums of a loss that are logged by another name, or not as means."""
_OF_SEVERAL: Final = frozenset({"ratio", "kl_old"})
"""Sums that compare the policy with itself before the step's first update: in a step of one update
they are constants."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """One completed step."""

    step: int
    """Number of the step, from 0."""
    version: int
    """Policy version after the step."""
    sessions: int
    prepared: PreparedStep
    update: UpdateStats | None
    """The statistics of the updates, or ``None`` if nothing was left to train on. The version stays
    the same if that is so for every policy of the run."""
    policy: PolicyRecord | None
    """The published version, if one was published."""
    learning_rate: float
    replay: Replay | None = None
    """The replayed sessions, or ``None`` if success replay is off."""
    mixed: Mixed | None = None
    """The recorded sessions beside its own, or ``None`` if the run has no share of them."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase: ``collect``, ``prepare``, ``score`` (old and reference logprobs),
    ``update``, ``probe``, ``publish``."""
    divergences: Mapping[str, float] = field(default_factory=dict)
    """The KL from the policy before, by name (:mod:`bridle.trainer.learner.probe`)."""
    others: Mapping[str, StepReport] = field(default_factory=dict)
    """Reports of the run's other policies, by name. Their time is included in ``seconds`` of this
    one."""

    @property
    def reward_mean(self) -> float:
        """The mean over the sessions that have a reward that counts, or NaN if there are none."""
        return float(np.mean(self.prepared.rewards)) if self.prepared.rewards else float("nan")

    @property
    def nothing_trained(self) -> str | None:
        """The reasons why the step trained nothing, or ``None`` if it trained something."""
        if self.update is not None:
            return None
        if not self.sessions:
            return "no session was collected"
        prepared = self.prepared
        sessions = [f"{n} {reason}" for reason, n in prepared.sessions_dropped.items()]
        tokens = [f"{n} {reason}" for reason, n in prepared.account.masked.items()]
        parts = [f"of {self.sessions} sessions {', '.join(sessions)}"] if sessions else []
        if tokens:
            parts.append(f"tokens masked: {', '.join(tokens)}")
        return "; ".join(parts) or "no session sampled a token"

    @property
    def logprob_gap(self) -> float | None:
        """Mean |engine logprob − trainer logprob| over trained tokens, at the sampling version."""
        return self.update.gap.mean if self.update else None

    def metrics(self) -> dict[str, float]:
        """Return the report as named numbers, without those that were not measured.

        The numbers of another policy begin with its name.
        """
        others = {
            f"{name}/{metric}": value
            for name, other in self.others.items()
            for metric, value in other._policy_metrics().items()
        }
        return {**self._own_metrics(), **others}

    def _policy_metrics(self) -> dict[str, float]:
        """Return the numbers that may differ between the policies of a run."""
        return {
            **self._session_metrics(),
            **self.prepared.signal,
            **self._token_metrics(),
            **self._staleness_metrics(),
            **self._teacher_metrics(),
            **self._update_metrics(),
            **self.divergences,
        }

    def _own_metrics(self) -> dict[str, float]:
        return {
            "policy/version": float(self.version),
            "policy/learning_rate": self.learning_rate,
            **self._reward_metrics(),
            **self._policy_metrics(),
            **(self.replay.metrics() if self.replay else {}),
            **(self.mixed.metrics() if self.mixed else {}),
            **{f"seconds/{phase}": value for phase, value in self.seconds.items()},
        }

    def _reward_metrics(self) -> dict[str, float]:
        rewards = self.prepared.rewards
        if not rewards:
            return {}
        return {
            "reward/mean": self.reward_mean,
            "reward/std": float(np.std(rewards)),
            "reward/min": min(rewards),
            "reward/max": max(rewards),
        }

    def _session_metrics(self) -> dict[str, float]:
        dropped = self.prepared.sessions_dropped
        return {
            "sessions/collected": float(self.sessions),
            "sessions/punished_for_length": float(self.prepared.punished_sessions),
            "rewards/unplaced": float(self.prepared.unplaced_rewards),
            "sessions/trained": float(self.sessions - sum(dropped.values())),
            "groups/collected": float(self.prepared.groups),
            "groups/zero_variance": float(self.prepared.degenerate_groups),
            **{f"sessions/dropped/{reason}": float(n) for reason, n in dropped.items()},
        }

    def _token_metrics(self) -> dict[str, float]:
        account = self.prepared.account
        return {
            "tokens/captured": float(account.captured),
            "tokens/trained": float(account.trained),
            "tokens/masked": float(account.masked.total()),
            "tokens/dropped": float(account.dropped.total()),
            **{f"tokens/masked/{reason}": float(n) for reason, n in account.masked.items()},
            **{f"tokens/dropped/{reason}": float(n) for reason, n in account.dropped.items()},
        }

    def _staleness_metrics(self) -> dict[str, float]:
        staleness = self.prepared.staleness
        if not len(staleness):
            return {}
        return {
            "staleness/mean": float(staleness.mean()),
            "staleness/max": float(staleness.max()),
        }

    def _teacher_metrics(self) -> dict[str, float]:
        gap = self.prepared.teacher_gap
        if gap is None:
            return {}
        metrics = {"distillation/tokens": float(gap.tokens)}
        if gap.without_context:
            metrics["distillation/without_context"] = float(gap.without_context)
        if gap.tokens:
            metrics |= {"distillation/gap": gap.mean, "distillation/clip_fraction": gap.clipped}
        return metrics

    def _update_metrics(self) -> dict[str, float]:
        update = self.update
        if update is None:
            return {}
        loss = update.loss
        left_out = _NAMED if len(update.grad_norms) > 1 else _NAMED | _OF_SEVERAL
        metrics = {
            "update/loss": loss["loss"] / len(update.grad_norms),
            "update/grad_norm": float(np.mean(update.grad_norms)),
            "update/skipped": float(update.skipped_updates),
            **{
                f"gradient/{kind}": float(np.mean([one[kind] for one in update.kind_norms]))
                for kind in update.kind_norms[0]
            },
            **{f"update/{name}": loss.mean(name) for name in loss if name not in left_out},
            "update/entropy": update.mean_entropy,
            "update/entropy_bonus": update.entropy_bonus,
            "importance/mean": loss.mean("importance"),
            "importance/outside": loss.mean("outside"),
            "packing/computed_tokens": float(update.computed_tokens),
            "packing/unshared_tokens": float(update.unshared_tokens),
            "packing/packs": float(update.packs),
            **update.drift.metrics(),
        }
        if len(update.grad_norms) > 1:
            metrics["update/clip_fraction"] = loss.mean("clipped")
        if squares := loss["importance_squares"]:
            # Kish's, as a share of the tokens.
            metrics["importance/effective"] = loss["importance"] ** 2 / (loss["tokens"] * squares)
        if update.gap.mean is not None:
            metrics["update/logprob_gap"] = update.gap.mean
            metrics["update/logprob_gap_max"] = update.gap.largest
        return metrics
