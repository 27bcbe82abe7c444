"""A whole training run on this machine: engine, proxy, rollouts and trainer."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from bridle.engine.contract.tokenizer import Tokenizer
from bridle.errors import UsageError
from bridle.harnesses.given import GIVEN_FILE, GivenRewards
from bridle.harnesses.rollout import RolloutResult, RolloutSettings
from bridle.harnesses.sampling import session_settings
from bridle.harnesses.tasks import Task
from bridle.reconstruct.evaluation import attempt_reward, attempts_of
from bridle.reconstruct.rewards import Aggregation, RewardNotice
from bridle.run.agents import first_tasks, shuffled_tasks
from bridle.run.attempts import attempt
from bridle.run.config import EvaluationConfig, GroupsConfig, RunConfig, TasksConfig
from bridle.run.environment import private_in
from bridle.run.evaluation import HeldOut
from bridle.run.fleets import fleet_of
from bridle.run.groups import FinishedGroups, key_of, planned
from bridle.run.holding import LOCK, hold
from bridle.run.hub import model_directory
from bridle.run.report import write_report
from bridle.run.rollouts import Rollouts
from bridle.run.stack import MODEL, stacks
from bridle.run.training import (
    CHECKPOINTS,
    TrainingPlan,
    newest_policy,
    require_devices,
    require_parts,
    require_several,
)
from bridle.run.training import train as train_plan
from bridle.store.reading.queries import Reader
from bridle.store.records import DEFAULT_POLICY, RunRecord, new_id
from bridle.store.schema.accounts import EVALUATION, evaluation_of
from bridle.store.schema.database import migrate
from bridle.store.writing.writer import Writer
from bridle.trainer.collection.curriculum import TaskChoice, horizon
from bridle.trainer.credit.rewards import aggregation
from bridle.trainer.learner.checkpoint import checkpoints
from bridle.trainer.learner.ranks import follow
from bridle.trainer.learner.world import World
from bridle.trainer.policy.model import check_policy
from bridle.trainer.report import StepReport

log = logging.getLogger(__name__)

_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")
"""The form of a policy's name, which also names a folder and is part of options of
``bridle proxy``."""


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The result of a training run."""

    run_id: str
    steps: int
    """Number of steps trained, those of earlier attempts included."""
    policy: Path
    """The model directory of the newest checkpoint."""
    store: str
    """The store with the run's sessions, metrics and policies."""
    others: Mapping[str, Path] = field(default_factory=dict)
    """The model directory of the newest checkpoint of each of ``config.policies``, by name."""
    report: Mapping[str, Any] = field(default_factory=dict)
    """The contents of ``report.json``, which is beside the plot ``reward.png``."""


@dataclass(frozen=True, slots=True)
class TrainingBegin:
    """A training run that is about to begin."""

    run_id: str
    store: str
    step: int
    """Number of steps that earlier attempts have trained."""
    sessions_per_step: int


def train(
    config: RunConfig,
    output: str | Path,
    *,
    on_begin: Callable[[TrainingBegin], None] = lambda _begin: None,
    on_session: Callable[[float | None], None] = lambda _reward: None,
    on_step: Callable[[StepReport], bool | None] = lambda _report: None,
    on_rule: Callable[[str], None] = log.info,
) -> TrainingResult:
    """Train the policy of ``config`` in its agent, or resume the run that ``output`` holds already.

    ``output`` receives the store, checkpoints, published weights, logs and the folders of failed
    sessions. ``on_begin`` is called before engine and proxy start, and ``on_rule`` once with a line
    about which rewards make a session's number. ``on_session`` is called from another thread with
    the reward of each session that has ended. ``on_step`` is called after each step and may return
    true to stop. Ctrl-C leaves a checkpoint of the last whole step.

    To train on several devices or machines, run the program under torchrun: rank 0 returns, and
    every other process exits when rank 0's run is over.

    Raise :class:`bridle.errors.BridleError`; before anything starts, it is a ``UsageError`` if
    ``config`` asks for something that does not exist.
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
        options={**config.tasks.options, **config.agent.options},
    )
    held_out = held_out_tasks(config.evaluation, config.tasks)
    policy = model_directory(config.policy.model)
    others = {
        name: model_directory(one.model or config.policy.model)
        for name, one in config.policies.items()
    }
    for each in (policy, *others.values()):
        check_policy(each)
    require_parts(training)
    require_devices(training)
    if others:
        require_several(training)
    tokenizer = Tokenizer(policy)
    for name, other in others.items():
        require_same_tokenizer(name, tokenizer, Tokenizer(other))
    if not World.current().is_first:
        follow(policy, training)
    fleet.require_launchable(adapter, tasks[0], directory / "sessions", MODEL)
    with hold(directory, directory / LOCK):
        store = str(directory / "bridle.db")
        migrate(store)
        run_id = _run_id(store)

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
            others=others,
            work={
                **{
                    name: asdict(getattr(config, name))
                    for name in ("tasks", "agent", "groups", "policy", "evaluation")
                },
                "policies": {name: asdict(one) for name, one in config.policies.items()},
            },
        )
        rule, notice = aggregation(training.advantages), RewardNotice(on_rule)

        settings = RolloutSettings(
            directory=directory / "sessions",
            parallel=config.agent.parallel,
            timeout_s=config.agent.timeout_s,
            model=MODEL,
            run_id=run_id,
            session_settings=session_settings(config.agent.sampling),
            hidden=private_in(directory),
            guards=config.agent.guards,
        )
        on_begin(
            TrainingBegin(
                run_id, store, _steps_trained(plan), config.groups.per_step * config.groups.size
            )
        )

        def on_result(result: RolloutResult) -> None:
            notice(rule, result.rewards)
            reward = attempt_reward(result.outcome, result.rewards, rule)
            if reward is not None:
                choice.learn([(keys[result.task_id], reward)])
            on_session(reward)

        with (
            attempt(store, *runs_of(run_id, adapter.name, held_out)),
            stacks(
                {DEFAULT_POLICY: policy, **others},
                config.policy_roles,
                store,
                directory / "logs",
                engine=config.policy.engine,
                engine_arguments=config.policy.engine_arguments,
                host=fleet.host,
            ) as further,
            Rollouts(
                (first := further.pop(DEFAULT_POLICY)).proxy_url,
                fleet,
                key=first.admin_key,
                given=GivenRewards(directory / GIVEN_FILE),
            ) as rollouts,
        ):
            loop = train_plan(
                plan,
                first,
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
                    on_result,
                ),
                on_step=on_step,
                held_out=HeldOut(
                    rollouts,
                    adapter,
                    held_out,
                    settings,
                    evaluation_run(store, run_id, rule),
                    config.evaluation.every,
                    config.evaluation.samples,
                    config.evaluation.success,
                )
                if held_out
                else None,
                given=rollouts.given,
                further=further,
            )
        with Reader(store) as reader:
            report = write_report(reader, run_id, directory)
    newest, *more = map(newest_policy, plan.each)
    return TrainingResult(
        run_id, loop.step, newest, store, dict(zip(others, more, strict=True)), report
    )


def _steps_trained(plan: TrainingPlan) -> int:
    """Return the steps of the newest checkpoint, or 0 if there is none."""
    kept = checkpoints(plan.directory / CHECKPOINTS)
    return int(kept[-1].name.rpartition("-")[2]) if kept else 0


def require_training(config: RunConfig) -> None:
    """Raise :class:`bridle.errors.UsageError` for parts of ``config`` that exclude each other."""
    if config.training.publish.through == "transfer" and config.policy.engine != "vllm":
        raise UsageError("weights are transferred to a vLLM only: add --engine vllm")
    for name, one in config.policies.items():
        if not _NAME.fullmatch(name) or name == DEFAULT_POLICY:
            raise UsageError(
                f"a policy of policies.{name} needs another name: of letters, digits, - and _, and "
                f"not {DEFAULT_POLICY!r}, which is the first one's"
            )
        for role in one.roles or (name,):
            if config.policy_roles[role] != name:
                raise UsageError(
                    f"role {role} has two policies, {name} and {config.policy_roles[role]}"
                )


def require_same_tokenizer(name: str, first: Tokenizer, other: Tokenizer) -> None:
    """Raise :class:`bridle.errors.UsageError` unless the policy ``name`` has the first one's
    tokenizer and chat template, which render and tokenize the prompts of both."""
    same = first.backend.to_str() == other.backend.to_str()
    if same and first.chat_template_source == other.chat_template_source:
        return
    raise UsageError(
        f"policies.{name}.model has another tokenizer or chat template than policy.model: begin "
        "both with one model"
    )


def _budget(groups: GroupsConfig, number: int) -> dict[str, Any]:
    """Return the settings of the sessions of group ``number``: the number of calls that they may
    make."""
    if not groups.horizon:
        return {}
    step = number // groups.per_step
    calls = horizon(step, groups.horizon, groups.horizon_growth, groups.horizon_every)
    return {"budget": {"calls": calls}}


def held_out_tasks(wanted: EvaluationConfig, trained: TasksConfig) -> list[Task]:
    """Return the tasks on which the policy is measured; there are none without
    ``evaluation.every``.

    Raise :class:`bridle.errors.UsageError` if they would be those on which it is trained.
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


def runs_of(run_id: str, name: str, held_out: Sequence[Task] = ()) -> list[RunRecord]:
    """Return the record of a training run, and that of its held-out sessions if there are any."""
    now = time.time()
    found = [RunRecord(run_id, "train", now, name=name)]
    if held_out:
        found.append(RunRecord(evaluation_of(run_id), EVALUATION, now, name=run_id))
    return found


def evaluation_run(store: str, run_id: str, rule: Aggregation) -> str:
    """Return the run of a training run's held-out sessions, which is begun already, and store
    ``rule`` in it, so that their rewards count by the same rule."""
    found = evaluation_of(run_id)
    with Writer(store) as writer:
        writer.configure_run(found, {"reward": rule.as_data()})
    return found


def _run_id(store: str) -> str:
    """Return the id of the store's training run, which a resumed run continues, or a new id if
    there is none."""
    with Reader(store) as reader:
        earlier = reader.runs("train")
    return earlier[-1].id if earlier else new_id("run")
