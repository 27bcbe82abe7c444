"""A whole training run on this machine: engine, proxy, rollouts and trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bridle.engine.contract.tokenizer import Tokenizer
from bridle.errors import UsageError
from bridle.harnesses.rollout import RolloutSettings
from bridle.harnesses.sampling import session_settings
from bridle.harnesses.tasks import Task
from bridle.harnesses.verifiers import REWARD
from bridle.reconstruct.evaluation import attempts_of
from bridle.run.agents import first_tasks, shuffled_tasks
from bridle.run.config import EvaluationConfig, GroupsConfig, RunConfig, TasksConfig
from bridle.run.evaluation import HeldOut
from bridle.run.fleets import fleet_of
from bridle.run.groups import FinishedGroups, key_of, planned
from bridle.run.holding import LOCK, hold
from bridle.run.hub import model_directory
from bridle.run.report import write_report
from bridle.run.rollouts import Rollouts
from bridle.run.stack import MODEL, stack
from bridle.run.training import TrainingPlan, newest_policy, require_devices, require_parts
from bridle.run.training import train as train_plan
from bridle.store.reading.queries import Reader
from bridle.store.records import RunRecord, new_id
from bridle.store.schema.database import migrate
from bridle.store.writing.writer import Writer
from bridle.trainer.collection.curriculum import TaskChoice, horizon
from bridle.trainer.learner.ranks import follow
from bridle.trainer.learner.world import World
from bridle.trainer.policy.model import check_policy
from bridle.trainer.report import StepReport


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """How a training run ended."""

    run_id: str
    steps: int
    """Steps trained, those of earlier attempts included."""
    policy: Path
    """Model directory of the newest checkpoint."""
    store: str
    """Where the run's sessions, metrics and policies are recorded."""
    report: Mapping[str, Any] = field(default_factory=dict)
    """What is in ``report.json``, beside the plot ``reward.png``."""


def train(
    config: RunConfig,
    output: str | Path,
    *,
    on_step: Callable[[StepReport], bool | None] = lambda _report: None,
) -> TrainingResult:
    """Trains the policy of ``config`` in its agent; resumes what ``output`` holds already.

    ``output`` receives the store, checkpoints, published weights, logs and the folders of failed
    sessions. ``on_step`` is called after each step and may return true to stop. Ctrl-C leaves a
    checkpoint of the last whole step.

    To train on several devices or machines, run the program under torchrun: rank 0 returns, and
    every other process exits when rank 0's run is over.

    Raises :class:`bridle.errors.BridleError`: a ``UsageError`` for what ``config`` asks for and is
    not there, before anything starts.
    """
    directory, training = Path(output), config.training
    require_training(config)
    tasks = shuffled_tasks(config.tasks.source, config.tasks.split, training.seed)
    adapter, fleet = fleet_of(
        config.agent.fleet if World.current().is_first else "local",
        config.agent.name,
        config.tasks.verifier,
        tasks,
        config.agent.sandbox,
        cpus=config.agent.cpus,
    )
    held_out = held_out_tasks(config.evaluation, config.tasks)
    policy = model_directory(config.policy.model)
    check_policy(policy)
    require_parts(training)
    require_devices(training)
    Tokenizer(policy)
    if not World.current().is_first:
        follow(policy, training)
    fleet.require_launchable(adapter, tasks[0], directory / "sessions", MODEL)
    with hold(directory, directory / LOCK):
        store = str(directory / "bridle.db")
        migrate(store)
        run_id = _run_id(store, adapter.name)

        keys = {task.id: key_of(task) for task in tasks}
        choice = TaskChoice(list(map(key_of, tasks)), training.seed, config.evaluation.success)
        with Reader(store) as reader:
            finished = FinishedGroups.of(reader, run_id)
            choice.learn((one.task, one.reward) for one in attempts_of(reader, run=run_id))
        plan = TrainingPlan(
            policy=policy,
            directory=directory,
            store=store,
            run_id=run_id,
            config=training,
            groups_per_step=config.groups.per_step,
            work={
                name: asdict(getattr(config, name))
                for name in ("tasks", "agent", "groups", "policy", "evaluation")
            },
        )
        settings = RolloutSettings(
            directory=directory / "sessions",
            parallel=config.agent.parallel,
            timeout_s=config.agent.timeout_s,
            model=MODEL,
            run_id=run_id,
            session_settings=session_settings(config.agent.sampling),
            guards=config.agent.guards,
        )
        with (
            stack(
                policy,
                store,
                directory / "logs",
                engine=config.policy.engine,
                engine_arguments=config.policy.engine_arguments,
                host=fleet.host,
            ) as running,
            Rollouts(running.proxy_url, fleet, key=running.admin_key) as rollouts,
        ):
            loop = train_plan(
                plan,
                running,
                rollouts.groups(
                    adapter,
                    planned(
                        run_id,
                        tasks,
                        config.groups.size,
                        finished,
                        choose=choice.draw if config.groups.weighted else None,
                        settings=lambda number: _budget(config.groups, number),
                    ),
                    settings,
                    lambda result: choice.learn(
                        [(keys[result.task_id], result.scores[REWARD])]
                        if REWARD in result.scores
                        else []
                    ),
                ),
                on_step=on_step,
                held_out=HeldOut(
                    rollouts,
                    adapter,
                    held_out,
                    settings,
                    evaluation_run(store, run_id),
                    config.evaluation.every,
                    config.evaluation.samples,
                    config.evaluation.success,
                )
                if held_out
                else None,
            )
        with Reader(store) as reader:
            report = write_report(reader, run_id, directory)
    return TrainingResult(run_id, loop.step, newest_policy(plan), store, report)


def require_training(config: RunConfig) -> None:
    """Raises :class:`bridle.errors.UsageError` for parts of ``config`` that exclude each other."""
    if config.training.publish.through == "transfer" and config.policy.engine != "vllm":
        raise UsageError("weights are transferred to a vLLM only: add --engine vllm")


def _budget(groups: GroupsConfig, number: int) -> dict[str, Any]:
    """The settings of the sessions of group ``number``: how many calls they may make."""
    if not groups.horizon:
        return {}
    step = number // groups.per_step
    calls = horizon(step, groups.horizon, groups.horizon_growth, groups.horizon_every)
    return {"budget": {"calls": calls}}


def held_out_tasks(wanted: EvaluationConfig, trained: TasksConfig) -> list[Task]:
    """The tasks that the policy is measured on; none without ``evaluation.every``.

    Raises :class:`bridle.errors.UsageError` where they would be those that it is trained on.
    """
    if not wanted.every:
        return []
    source = wanted.source or trained.source
    if (source, wanted.split) == (trained.source, trained.split):
        raise UsageError(
            "the held-out tasks are those that are trained on: name evaluation.split or "
            "evaluation.source"
        )
    return first_tasks(source, wanted.split, wanted.limit)


def evaluation_run(store: str, run_id: str) -> str:
    """The run of a training run's held-out sessions."""
    found = f"{run_id}.eval"
    with Reader(store) as reader:
        known = any(run.id == found for run in reader.runs("eval"))
    if not known:
        with Writer(store) as writer:
            writer.add_sync(RunRecord(found, "eval", time.time(), name=run_id))
    return found


def _run_id(store: str, harness: str) -> str:
    """The store's training run, which a resumed run continues; a new one in a new store."""
    with Reader(store) as reader:
        earlier = reader.runs("train")
    if earlier:
        return earlier[-1].id
    run_id = new_id("run")
    with Writer(store) as writer:
        writer.add_sync(RunRecord(run_id, "train", time.time(), name=harness))
    return run_id
