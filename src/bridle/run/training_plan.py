"""The plan of a training run, and what the store keeps of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bridle.diagnosis.findings.training import RATE_WARNING
from bridle.reconstruct.samples.builders import BUILDER_VERSION
from bridle.reconstruct.samples.rules import DEFAULT_RULES, SampleRules
from bridle.run.config import RecordingsConfig
from bridle.store.records import DEFAULT_POLICY, CallKind, PolicyRecord
from bridle.trainer.config import GrpoConfig
from bridle.trainer.credit.rewards import aggregation
from bridle.trainer.learner.rates import rate_warning, resolved


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The plan of a training run: its policy, its configuration, and the places of its output."""

    policy: Path
    """The model directory of version 0."""
    directory: Path
    """The folder that receives ``checkpoints/``, ``published/`` and ``tensorboard/``."""
    store: str
    run_id: str
    """The id of the run in the store under which sessions, metrics and policies are kept."""
    config: GrpoConfig
    groups_per_step: int = 8
    group_size: int = 8
    others: Mapping[str, Path] = field(default_factory=dict)
    """The model directories of the policies that are trained beside it, by name."""
    name: str = DEFAULT_POLICY
    """The name of ``policy``."""
    recordings: RecordingsConfig | None = None
    """The recorded sessions that each step trains beside its own, if it does."""
    work: Mapping[str, Any] = field(default_factory=dict)
    """Further parts of the run's ``config`` in the store: tasks, agent, groups, policy."""

    @property
    def beginning(self) -> PolicyRecord:
        """Version 0 of the policy, as it begins now."""
        return PolicyRecord(self.run_id, 0, time.time(), path=str(self.policy), name=self.name)

    @property
    def each(self) -> list[TrainingPlan]:
        """A plan for every policy, with a directory of its own; this one first."""
        below = self.directory / "policies"
        return [
            self,
            *(
                replace(self, policy=policy, name=name, directory=below / name, others={})
                for name, policy in self.others.items()
            ),
        ]


def stated(config: GrpoConfig) -> dict[str, Any]:
    """Return the part of a run's ``config`` in the store that ``config`` decides.

    It is how samples are made, how rewards add up, and every setting.
    """
    return {
        "samples": {
            "builder": "tree",
            "builder_version": BUILDER_VERSION,
            "rules": rules_of(config).as_data(),
        },
        "reward": aggregation(config.advantages).as_data(),
        "settings": asdict(resolved(config)),
    }


def rules_of(config: GrpoConfig) -> SampleRules:
    """Return the rules for which tokens of a session ``config`` trains."""
    return replace(DEFAULT_RULES, kinds=frozenset(map(CallKind, config.samples.kinds)))


def configured(plan: TrainingPlan) -> dict[str, Any]:
    """Return the ``config`` of the plan's run, as the store keeps it."""
    warning = rate_warning(plan.config, plan.policy)
    return {
        **stated(plan.config),
        **plan.work,
        **({RATE_WARNING: warning} if warning is not None else {}),
    }
