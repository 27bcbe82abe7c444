"""The configuration of a training run: its tasks, agent, policy, sizes and training settings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from msgspec import Meta, to_builtins

from bridle.harnesses.guards import GuardAction
from bridle.harnesses.permissions import Permissions
from bridle.harnesses.sandboxes.bounds import Bounds
from bridle.registry import Options
from bridle.run.environment import EngineKind, default_store
from bridle.run.settings import parse_overrides, settings_from
from bridle.store.records import DEFAULT_POLICY
from bridle.store.reward import RewardSource
from bridle.trainer.collection.branching import Where
from bridle.trainer.config import AboveZero, Count, GrpoConfig, Natural, Share

Named = Annotated[str, Meta(min_length=1)]


@dataclass(frozen=True, slots=True)
class TasksConfig:
    """The tasks, and the verifier that scores a session on one."""

    source: str = ""
    """The tasks: ``FILE.jsonl``, ``FILE.py:FUNCTION``, ``MODULE:FUNCTION``, ``harbor:PATH``,
    ``verifiers:NAME``, or another ``SCHEME:REFERENCE`` that is installed."""
    verifier: Named = "task"
    """The verifier: ``task`` (the task's own), ``number``, ``exact``, ``regex``, ``FILE.py:NAME``
    or ``MODULE:NAME``."""
    split: str | None = None
    """The split whose tasks are used; ``None`` stands for all tasks."""
    env: tuple[str, ...] = ()
    """Names of environment variables of this machine that a task may take as ``${NAME}``."""
    options: Options = field(default_factory=dict)
    """The own options of verifiers, by the verifier's name, such as ``options.regex.pattern``."""


@dataclass(frozen=True, slots=True)
class ScorersConfig:
    """The scorers, which read a session's record after the verifier (``docs/tasks.md``)."""

    named: tuple[Named, ...] = ()
    """The scorers: ``cost``, ``format``, ``rubric``, an installed one, ``FILE.py:NAME`` or
    ``MODULE:NAME``."""
    artefacts: tuple[Named, ...] = ()
    """Files of the workspace that scorers get, if the agent left them."""
    judgements: Natural | None = None
    """Maximum number of judgements that scorers ask of models; ``None`` sets no limit."""
    options: Options = field(default_factory=dict)
    """The own options of scorers, by the scorer's name, such as ``options.cost.token``."""


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """The harness, and how its sessions run."""

    name: str = ""
    """A harness (``codex``, or ``FILE.py:NAME``), a Python script (``agent.py``), or a command line
    that contains ``{prompt}``."""
    sandbox: Named | None = None
    """The sandbox: ``process``, ``process-network``, ``forked``, ``container``,
    ``container-forked``, an installed one, or ``FILE.py:NAME``. ``None`` stands for the one that
    suits the tasks and the harness."""
    unsafe_sandbox: bool = False
    """Let ``process`` and ``forked`` sessions run as this user, with this user's files and
    network, where the machine gives them no walls (bubblewrap)."""
    env: tuple[str, ...] = ()
    """Names of environment variables of this machine that sessions get, besides the few that every
    session has."""
    shown: tuple[str, ...] = ()
    """Files and folders of this machine that ``process`` and ``forked`` sessions see, read-only,
    besides the system's, Python's and those that the command names."""
    bounds: Bounds = field(default_factory=Bounds)
    """The bounds of a session in ``process`` and ``forked``; 0 stands for none."""
    sampling: Named = "policy"
    """The distribution that tokens are drawn from: ``policy`` (the policy's own), ``agent`` (as the
    harness asks), or ``temperature=0.7,top_p=0.8``."""
    parallel: Count = 16
    """Maximum number of sessions at a time."""
    fleet: Named = "local"
    """The fleet that runs the sessions: ``local``, ``ray``, ``ray:ADDRESS``, an installed one, or
    ``FILE.py:NAME``."""
    cpus: AboveZero = 1.0
    """Cores of a Ray machine per session; a task may state its own number."""
    timeout_s: AboveZero = 600.0
    """Maximum seconds per session; a task may state its own."""
    directory: str | None = None
    """The folder of workspaces and logs, on each machine. ``None`` stands for ``OUT/sessions``."""
    guards: GuardAction = "warn"
    """The cost to a session of reading the git history, editing tests, using the network or reading
    reward files: nothing (``warn``), its reward (``zero``), or its place in training
    (``quarantine``)."""
    options: Options = field(default_factory=dict)
    """The own options of harnesses, sandboxes and fleets, by their name, such as
    ``options.codex.context_window``."""


def permitted(agent: AgentConfig, tasks: TasksConfig) -> Permissions:
    """Return the permissions that a configuration gives."""
    return Permissions(agent.unsafe_sandbox, agent.env, agent.shown, tasks.env)


@dataclass(frozen=True, slots=True)
class GroupsConfig:
    """The size of a training step, which collects ``per_step * size`` sessions."""

    per_step: Count = 8
    """Number of tasks per step."""
    size: Count = 8
    """Number of sessions per task, which are compared with each other."""
    weighted: bool = False
    """Draw tasks by ``p (1 - p)`` of their success so far, instead of taking them in
    turn."""
    branch: Share = 0.0
    """The share of groups whose sessions re-enter one earlier session of the run at one of its
    calls (``docs/re-entry.md``); only what follows is sampled and trained."""
    branch_at: Where = "random"
    """The call: of any session (``random``), of a ``failed`` one, by its surprise (``entropy``), or
    by the variance of a sibling's result for each call that it samples (``value``)."""
    branch_recent: Count = 16
    """Number of the latest groups whose sessions can be re-entered."""
    horizon: Natural = 0
    """Maximum number of calls per session in the first steps; 0 sets no limit. Siblings branch at
    one of the last ``horizon`` calls, so that their prefix is long at first."""
    horizon_growth: Natural = 0
    """Number of calls that are added after each ``horizon_every`` steps (ScalingInter-RL, arXiv
    2509.08755)."""
    horizon_every: Count = 10


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """The held-out tasks on which the policy is measured while it is trained."""

    every: Natural = 0
    """Number of steps between measurements; 0 turns them off. The policy is also measured before
    the first step and after the last."""
    source: str | None = None
    """The held-out tasks, in the forms of ``tasks.source``, which is the default."""
    split: str | None = None
    """The split whose tasks are used; ``None`` stands for all tasks."""
    limit: Count = 64
    """Maximum number of tasks."""
    samples: Count = 1
    """Number of sessions per task."""
    success: float = 1.0
    """The lowest reward with which a session has passed."""


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """The model that is trained, and the engine that serves it."""

    model: Named
    """The model of version 0: its directory, or its name on the Hugging Face Hub."""
    engine: EngineKind = "embedded"
    """The engine that the run starts; ``docs/vllm.md`` is about ``vllm``."""
    engine_arguments: tuple[str, ...] = ()
    """Further options of ``bridle engine``, such as ``--max-model-len=4096``."""


@dataclass(frozen=True, slots=True)
class FurtherPolicy:
    """A further policy, which is trained for some roles of the agent and has its own engine."""

    model: str | None = None
    """The model of version 0, ``policy.model`` by default. It must have the same tokenizer and chat
    template."""
    roles: tuple[str, ...] = ()
    """The roles whose calls go to this policy; by default the role that has its name."""


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """The settings of a rollout."""

    tasks: TasksConfig
    agent: AgentConfig = AgentConfig(parallel=4)
    limit: Count | None = None
    """Maximum number of tasks; ``None`` sets no limit."""
    group_size: Count = 1
    """Number of sessions per task, which are compared with each other."""
    model: Named = "policy"
    """The name of the model that the harness asks for."""
    scorers: ScorersConfig = field(default_factory=ScorersConfig)


def reentrant(config: RolloutConfig) -> dict[str, Any]:
    """Return the settings with which a run's sessions can be re-entered, as its record has them.

    ``folder`` is the folder from which relative names of files start.
    """
    return {**to_builtins(config), "folder": os.getcwd()}


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """The settings of an evaluation, by new sessions of agents or by recorded ones."""

    tasks: TasksConfig
    agent: AgentConfig = AgentConfig(parallel=4)
    limit: Count | None = None
    """Maximum number of tasks; ``None`` sets no limit."""
    samples: Count = 1
    """Number of sessions per task."""
    model: str | None = None
    """The model to serve: its directory, or its name on the Hugging Face Hub. ``None`` stands for
    the one that ``--proxy`` serves."""
    engine: EngineKind = "embedded"
    """The engine that serves ``model``."""
    k: tuple[Count, ...] = ()
    """The values of k in pass@k; empty for 1 and ``samples``."""
    success: float = 1.0
    """The lowest reward with which a session has passed."""
    by: Literal["harness", "task", "version"] = "harness"
    """The property of sessions that has a row of the table for each value."""
    plot: bool = False
    """Draw pass@k into ``OUT/eval.png``."""
    where: str | None = None
    """An SQL condition on the columns of ``sessions``, for recorded sessions."""
    sources: tuple[RewardSource, ...] | None = None
    """The sources of rewards that count, for recorded sessions. ``None`` stands for those that the
    run states."""


@dataclass(frozen=True, slots=True)
class ServicesConfig:
    """An engine and a proxy that are running. Without ``engine_urls`` a run starts its own."""

    engine_urls: tuple[str, ...] = ()
    """Base URL of a running engine that can read ``--out``; several engines serve one policy."""
    proxy_url: str | None = None
    """Base URL of the running proxy in front of it; ``$BRIDLE_PROXY`` by default."""
    store: str | None = None
    """The store of that proxy, as a path or a database URL; ``$BRIDLE_STORE`` by default."""


@dataclass(frozen=True, slots=True)
class RecordingsConfig:
    """The recorded sessions that a run trains, instead of running an agent or beside that."""

    store: str | None = None
    """Train the sessions that this store (a path or a database URL) holds, and run no agent unless
    ``share`` is set. With ``share`` and no store, they are those of the run's own store."""
    share: Share = 0.0
    """Number of recorded sessions in a step beside those of the agent, as a fraction of them,
    rounded (:mod:`bridle.trainer.collection.mixture`)."""
    per_task: Count = 64
    """Number of latest sessions of each task that ``share`` is drawn from."""
    run: str | None = None
    """The id of the run whose sessions are trained; ``None`` stands for all sessions."""
    where: str | None = None
    """An SQL condition on the columns of ``sessions``, such as ``harness = 'pi'``."""
    version: Natural = 0
    """The policy version that ``policy.model`` is in the recordings."""
    wait_for: Count | None = None
    """The number of a group's sessions that must be sealed and rewarded before the group is
    trained; the run then waits for further groups. With ``None`` it trains the groups that are
    there."""
    other_policy: bool = False
    """Train sessions although they were drawn from other weights; importance weights
    bound the effect of that."""
    policy: Named = DEFAULT_POLICY
    """The name of the policy to train, for sessions that were recorded with several."""

    @property
    def alone(self) -> bool:
        """Return whether recorded sessions are trained and no agent runs."""
        return self.store is not None and not self.share


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The settings of a training run. They are stored with the run."""

    tasks: TasksConfig
    agent: AgentConfig
    policy: PolicyConfig
    groups: GroupsConfig = GroupsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    training: GrpoConfig = field(default_factory=GrpoConfig)
    policies: Mapping[str, FurtherPolicy] = field(default_factory=dict)
    """The policies that are trained beside ``policy``, by name."""
    scorers: ScorersConfig = field(default_factory=ScorersConfig)
    services: ServicesConfig = ServicesConfig()
    recordings: RecordingsConfig = RecordingsConfig()

    @property
    def shared_store(self) -> str | None:
        """The store of the recordings that are trained alone, or else of the running services.

        ``None`` for a run that starts its own proxy, which has a store of its own.
        """
        if self.recordings.alone or not self.services.engine_urls:
            return self.recordings.store if self.recordings.alone else None
        return self.services.store or default_store()

    @property
    def policy_roles(self) -> dict[str, str]:
        """The name of the policy of each role that does not use the first one."""
        return {role: name for name, one in self.policies.items() for role in one.roles or (name,)}

    @classmethod
    def load(cls, file: str | Path, overrides: Sequence[str] = ()) -> Self:
        """Return the configuration in a TOML file, with ``overrides`` such as ``groups.size=4``.

        Raise :class:`bridle.run.settings.SettingsError`.
        """
        return settings_from(cls, Path(file), overrides=parse_overrides(overrides))
