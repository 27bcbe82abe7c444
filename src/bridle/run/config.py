"""One training run as one value: what is run, how much of it, and how it is trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Self

from msgspec import Meta

from bridle.harnesses.guards import GuardAction
from bridle.run.agents import SandboxKind
from bridle.run.environment import EngineKind
from bridle.run.settings import parse_overrides, settings_from
from bridle.trainer.config import AboveZero, Count, GrpoConfig, Natural, OptimizerConfig

Named = Annotated[str, Meta(min_length=1)]


@dataclass(frozen=True, slots=True)
class TasksConfig:
    """The tasks, and what scores a session on one."""

    source: Named
    """``FILE.jsonl``, ``FILE.py:FUNCTION``, ``MODULE:FUNCTION``, ``harbor:PATH`` or
    ``verifiers:NAME``."""
    verifier: Named = "task"
    """``task`` (its own), ``number``, ``exact``, ``regex``, ``FILE.py:NAME`` or ``MODULE:NAME``."""
    split: str | None = None
    """Only tasks of this split; ``None``: all."""


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """The harness and how its sessions run."""

    name: Named
    """An installed harness (``codex``), a Python script (``agent.py``), or a command line that
    contains ``{prompt}``."""
    sandbox: SandboxKind | None = None
    """``process``, ``process-network``, ``forked``, ``container``, ``container-forked``; ``None``:
    what suits the tasks and the harness."""
    sampling: Named = "policy"
    """What tokens are drawn from: ``policy`` (its own distribution), ``agent`` (as the harness
    asks), or ``temperature=0.7,top_p=0.8``."""
    parallel: Count = 16
    """Sessions at a time."""
    fleet: Named = "local"
    """What runs the sessions: ``local``, ``ray`` or ``ray:ADDRESS``."""
    cpus: AboveZero = 1.0
    """Cores that a session takes of a Ray machine; a task may state its own."""
    timeout_s: AboveZero = 600.0
    """Longest time of one session, in seconds; a task may state its own."""
    guards: GuardAction = "warn"
    """What reading the git history, editing tests, using the network or reading reward files costs
    a session: nothing, its reward (``zero``), or its place in training (``quarantine``)."""


@dataclass(frozen=True, slots=True)
class GroupsConfig:
    """How many sessions one training step collects: ``per_step * size``."""

    per_step: Count = 8
    """Tasks per step."""
    size: Count = 8
    """Sessions per task, which are compared with each other."""
    weighted: bool = False
    """Draw tasks by ``p (1 - p)`` of their success so far, instead of taking them in turn."""
    horizon: Natural = 0
    """Calls that a session of the first steps may make; 0: as many as it likes."""
    horizon_growth: Natural = 0
    """Calls more after each ``horizon_every`` steps (ScalingInter-RL, arXiv 2509.08755)."""
    horizon_every: Count = 10


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """Held-out tasks that the policy is measured on while it is trained."""

    every: Natural = 0
    """Steps between measurements; 0: none. It is also measured before the first step and after the
    last."""
    source: str | None = None
    """As ``tasks.source``, which it is by default."""
    split: str | None = None
    """Only tasks of this split."""
    limit: Count = 64
    """Most tasks."""
    samples: Count = 1
    """Sessions per task."""
    success: float = 1.0
    """The reward from which on a session has passed."""


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """The model that is trained, and the engine that serves it."""

    model: Named
    """Model of version 0: its directory, or its name on the Hugging Face Hub."""
    engine: EngineKind = "embedded"
    engine_arguments: tuple[str, ...] = ()
    """Further options of ``bridle engine``, such as ``--max-model-len=4096``."""


@dataclass(frozen=True, slots=True)
class FurtherPolicy:
    """A policy of its own for some roles of the agent, served by an engine of its own as the first
    policy is."""

    model: str | None = None
    """Model of version 0, with the tokenizer and chat template of ``policy.model``, which it is by
    default."""
    roles: tuple[str, ...] = ()
    """Roles whose calls go to it; none: the one that has its name."""


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Everything that decides a training run. Stored with the run."""

    tasks: TasksConfig
    agent: AgentConfig
    policy: PolicyConfig
    groups: GroupsConfig = GroupsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    training: GrpoConfig = field(
        default_factory=lambda: GrpoConfig(optimizer=OptimizerConfig(learning_rate=1e-6))
    )
    policies: Mapping[str, FurtherPolicy] = field(default_factory=dict)
    """Policies that are trained beside ``policy``, by name."""

    @property
    def policy_roles(self) -> dict[str, str]:
        """The policy of each role that does not ask the first one."""
        return {role: name for name, one in self.policies.items() for role in one.roles or (name,)}

    @classmethod
    def load(cls, file: str | Path, overrides: Sequence[str] = ()) -> Self:
        """The configuration in a TOML file, with ``overrides`` such as ``groups.size=4``.

        Raises :class:`bridle.run.settings.SettingsError`.
        """
        return settings_from(cls, Path(file), overrides=parse_overrides(overrides))
