"""A whole training run: an agent's sessions, or recorded ones, and the trainer.

The engine and the proxy are the run's own, or services that are running.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bridle.engine.contract.tokenizer import Tokenizer
from bridle.harnesses.adapters.base import Adapter
from bridle.harnesses.fleet import Fleet
from bridle.harnesses.given import GIVEN_FILE, GivenRewards
from bridle.harnesses.rollout import RolloutResult, RolloutSettings
from bridle.harnesses.scorers.trial import require_scorers
from bridle.harnesses.tasks import Task
from bridle.reconstruct.evaluation import attempts_of, judged
from bridle.reconstruct.rewards import Aggregation, RewardNotice
from bridle.run.agents import shuffled_tasks
from bridle.run.attempts import attempt
from bridle.run.branching import Branches
from bridle.run.config import (
    GroupsConfig,
    RunConfig,
    permitted,
)
from bridle.run.environment import private_in, store_files
from bridle.run.evaluation import HeldOut
from bridle.run.groups import FinishedGroups, key_of, planned
from bridle.run.holding import LOCK, hold
from bridle.run.hub import model_directory
from bridle.run.recorded import train_recorded
from bridle.run.report import write_report
from bridle.run.requirements import (
    held_out_tasks,
    publishes_lora,
    require_one_base,
    require_same_tokenizer,
    require_training,
)
from bridle.run.rollouts import Rollouts, configured_fleet, configured_settings
from bridle.run.stack import MODEL, EngineChoice, Stack, running_stack, stacks
from bridle.run.training import (
    CHECKPOINTS,
    newest_policy,
    require_devices,
    require_parts,
    require_several,
    resumable,
)
from bridle.run.training import train as train_plan
from bridle.run.training_plan import TrainingPlan
from bridle.store.reading.queries import Reader
from bridle.store.records import DEFAULT_POLICY, RunRecord, new_id
from bridle.store.schema.accounts import EVALUATION, evaluation_of
from bridle.store.schema.database import migrate
from bridle.store.writing.writer import Writer
from bridle.trainer.collection.curriculum import TaskChoice, horizon
from bridle.trainer.credit.rewards import aggregation
from bridle.trainer.learner.checkpoint import checkpoints
from bridle.trainer.learner.ranks import follow
from bridle.trainer.learner.rates import rate_line, rate_warning
from bridle.trainer.learner.world import World
from bridle.trainer.loop import GrpoLoop
from bridle.trainer.policy.model import check_policy
from bridle.trainer.report import StepReport

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The result of a training run."""

    run_id: str
    steps: int
    """Number of steps trained, those of earlier attempts included."""
    planned: int
    """Number of steps that the run was to train. Recordings may have fewer than are set."""
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
    starts_services: bool = True


def train(
    config: RunConfig,
    output: str | Path,
    *,
    on_begin: Callable[[TrainingBegin], None] = lambda _begin: None,
    on_session: Callable[[float | None], None] = lambda _reward: None,
    on_step: Callable[[StepReport], bool | None] = lambda _report: None,
    on_rule: Callable[[str], None] = log.info,
) -> TrainingResult:
    """Train the policy of ``config``, or resume the run that ``output`` holds already.

    The run starts an engine and a proxy, unless ``config.services`` names running ones. With
    ``config.recordings`` it trains recorded sessions, and publishes its versions only to running
    services. ``output`` receives checkpoints, published weights, logs and the folders of failed
    sessions, and the store of a run that starts its own proxy. ``on_begin`` is called before the
    agent's sessions begin, and ``on_rule`` once with a line about which rewards make a session's
    number. ``on_session`` is called from another thread with the reward of each session that has
    ended. ``on_step`` is called after each step and may return true to stop. Ctrl-C leaves a
    checkpoint of the last whole step.

    To train on several devices or machines, run the program under torchrun: rank 0 returns, and
    every other process exits when rank 0's run is over.

    Raise :class:`bridle.errors.BridleError`; before anything starts, it is a ``UsageError`` if
    ``config`` asks for something that does not exist.
    """
    directory, training, recordings = Path(output), config.training, config.recordings
    require_training(config)
    work = None if recordings.alone else _work_of(config, directory)
    policy = model_directory(config.policy.model)
    others = {
        name: model_directory(one.model or config.policy.model)
        for name, one in config.policies.items()
    }
    for each in (policy, *others.values()):
        check_policy(each)
    require_parts(training, None if work is None else work.tasks[0].payload)
    require_devices(training)
    if others:
        require_several(training)
    tokenizer = Tokenizer(policy)
    if publishes_lora(config):
        require_one_base(policy, others)
    for name, other in others.items():
        require_same_tokenizer(name, tokenizer, Tokenizer(other))
    if not World.current().is_first:
        follow(policy, training)
    if work is not None:
        require_scorers(
            config.scorers.named, work.settings.scorers, work.tasks[0], config.agent.bounds
        )
        work.fleet.require_launchable(work.adapter, work.tasks[0], work.settings.directory, MODEL)
    with hold(directory, directory / LOCK):
        if (store := config.shared_store) is None:
            store = str(directory / "bridle.db")
            migrate(store)
            run_id = _run_id(store)
        else:
            run_id = f"train:{directory.resolve().name}"
        parts = (
            ("groups", "policy")
            if work is None
            else ("tasks", "agent", "groups", "policy", "evaluation")
        )
        plan = TrainingPlan(
            policy=policy,
            directory=directory,
            store=store,
            run_id=run_id,
            config=training,
            groups_per_step=config.groups.per_step,
            group_size=config.groups.size,
            others=others,
            name=recordings.policy,
            recordings=recordings if recordings.share else None,
            work={
                **{name: asdict(getattr(config, name)) for name in parts},
                "folder": os.getcwd(),
                "policies": {name: asdict(one) for name, one in config.policies.items()},
            },
        )
        if work is None:
            loop = _train_recorded(plan, config, on_step, on_rule)
        else:
            loop = _train_agent(plan, config, work, on_begin, on_session, on_step, on_rule)
        with Reader(store) as reader:
            report = write_report(reader, run_id, directory)
    newest, *more = map(newest_policy, plan.each)
    return TrainingResult(
        run_id,
        loop.step,
        loop.config.steps,
        newest,
        store,
        dict(zip(others, more, strict=True)),
        report,
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """The sessions of a run: its agent, what runs it, and the tasks."""

    adapter: Adapter
    fleet: Fleet
    tasks: list[Task]
    held_out: list[Task]
    settings: RolloutSettings


def _work_of(config: RunConfig, directory: Path) -> _Work:
    permitted(config.agent, config.tasks).grant()
    tasks = shuffled_tasks(config.tasks.source, config.tasks.split, config.training.seed)
    fleet = None if World.current().is_first else "local"
    own = configured_fleet(config.agent, config.tasks, tasks, fleet)
    held_out = held_out_tasks(config.evaluation, config.tasks)
    folder = Path(config.agent.directory) if config.agent.directory else directory / "sessions"
    settings = configured_settings(config.agent, config.scorers, folder, model=MODEL)
    return _Work(*own, tasks, held_out, settings)


def _announce_rate(plan: TrainingPlan, on_rule: Callable[[str], None]) -> None:
    on_rule(rate_line(plan.config))
    if (warning := rate_warning(plan.config, plan.policy)) is not None:
        on_rule(f"warning: {warning}")


def _train_recorded(
    plan: TrainingPlan,
    config: RunConfig,
    on_step: Callable[[StepReport], bool | None],
    on_rule: Callable[[str], None],
) -> GrpoLoop:
    with attempt(plan.store, *runs_of(plan.run_id, plan.directory.resolve().name)), resumable():
        _announce_rate(plan, on_rule)
        stack = running_stack(config.services) if config.services.engine_urls else None
        return train_recorded(
            plan, config.recordings, stack=stack, on_step=on_step, on_rule=on_rule
        )


def _train_agent(
    plan: TrainingPlan,
    config: RunConfig,
    work: _Work,
    on_begin: Callable[[TrainingBegin], None],
    on_session: Callable[[float | None], None],
    on_step: Callable[[StepReport], bool | None],
    on_rule: Callable[[str], None],
) -> GrpoLoop:
    keys = {task.id: key_of(task) for task in work.tasks}
    choice = TaskChoice(
        list(map(key_of, work.tasks)), config.training.seed, config.evaluation.success
    )
    with Reader(plan.store) as reader:
        finished = FinishedGroups.of(reader, plan.run_id)
        choice.learn((one.task, one.judged_by) for one in attempts_of(reader, run=plan.run_id))
    rule, notice = aggregation(config.training.advantages), RewardNotice(on_rule)
    hidden = (*private_in(plan.directory), *store_files(plan.store))
    settings = replace(work.settings, run_id=plan.run_id, hidden=hidden)
    per_step = config.groups.per_step * config.groups.size
    starts = not config.services.engine_urls
    on_begin(TrainingBegin(plan.run_id, plan.store, _steps_trained(plan), per_step, starts))
    _announce_rate(plan, on_rule)

    def on_result(result: RolloutResult) -> None:
        notice(rule, result.rewards)
        numbers = judged(result.outcome, result.rewards, rule)
        if numbers is not None:
            choice.learn([(keys[result.task_id], numbers.success)])
            if result.session_id is not None:
                passed = numbers.success >= config.evaluation.success
                branches.learn(result.session_id, result.group_id, keys[result.task_id], passed)
        on_session(None if numbers is None else numbers.reward)

    with (
        attempt(plan.store, *runs_of(plan.run_id, plan.directory.resolve().name, work.held_out)),
        Reader(plan.store) as recorded,
        _stacks(plan, config, work.fleet.host) as further,
        Rollouts(
            (first := further.pop(DEFAULT_POLICY)).proxy_url,
            work.fleet,
            key=first.admin_key,
            given=GivenRewards(plan.directory / GIVEN_FILE),
        ) as rollouts,
    ):
        branches = Branches(
            recorded,
            config.groups,
            config.training.seed,
            lambda number: _horizon(config.groups, number),
        )
        planning = planned(
            plan.run_id,
            work.tasks,
            config.groups.size,
            finished,
            choose=choice.draw if config.groups.weighted else None,
            settings=lambda number, origin: _budget(
                config.groups, number, branches.calls_before(origin)
            ),
            branch=branches,
        )
        measured = None
        if work.held_out:
            measured = HeldOut(
                rollouts,
                work.adapter,
                work.held_out,
                settings,
                evaluation_run(plan.store, plan.run_id, rule),
                config.evaluation.every,
                config.evaluation.samples,
                config.evaluation.success,
            )
        loop = train_plan(
            plan,
            first,
            rollouts.groups(work.adapter, planning, settings, on_result),
            on_step=on_step,
            held_out=measured,
            given=rollouts.given,
            further=further,
        )
        if line := rollouts.judgements_line():
            on_rule(line)
        return loop


@contextmanager
def _stacks(plan: TrainingPlan, config: RunConfig, host: str) -> Iterator[dict[str, Stack]]:
    """Yield the stack of each policy, by name: the running services, or else own ones."""
    if config.services.engine_urls:
        with resumable():
            running = running_stack(config.services)
        yield {DEFAULT_POLICY: running}
        return
    with stacks(
        {DEFAULT_POLICY: plan.policy, **plan.others},
        config.policy_roles,
        plan.store,
        plan.directory / "logs",
        engine=EngineChoice(
            config.policy.engine,
            config.policy.engine_arguments,
            config.training.lora.rank if publishes_lora(config) else None,
        ),
        host=host,
    ) as own:
        yield own


def _steps_trained(plan: TrainingPlan) -> int:
    """Return the steps of the newest checkpoint, or 0 if there is none."""
    kept = checkpoints(plan.directory / CHECKPOINTS)
    return int(kept[-1].name.rpartition("-")[2]) if kept else 0


def _horizon(groups: GroupsConfig, number: int) -> int:
    """Return the number of calls that the sessions of group ``number`` may make; 0: any."""
    if not groups.horizon:
        return 0
    step = number // groups.per_step
    return horizon(step, groups.horizon, groups.horizon_growth, groups.horizon_every)


def _budget(groups: GroupsConfig, number: int, replayed: int) -> dict[str, Any]:
    """Return the settings of the sessions of group ``number``.

    The settings are the number of calls that the sessions may make, after ``replayed`` ones.
    """
    calls = _horizon(groups, number)
    return {"budget": {"calls": replayed + calls}} if calls else {}


def runs_of(run_id: str, name: str, held_out: Sequence[Task] = ()) -> list[RunRecord]:
    """Return the record of a training run, and that of its held-out sessions if there are any."""
    now = time.time()
    found = [RunRecord(run_id, "train", now, name=name)]
    if held_out:
        found.append(RunRecord(evaluation_of(run_id), EVALUATION, now, name=run_id))
    return found


def evaluation_run(store: str, run_id: str, rule: Aggregation) -> str:
    """Return the run of a training run's held-out sessions, which is begun already.

    Store ``rule`` in it, so that their rewards count by the same rule.
    """
    found = evaluation_of(run_id)
    with Writer(store) as writer:
        writer.configure_run(found, {"reward": rule.as_data()})
    return found


def _run_id(store: str) -> str:
    """Return the id of the store's training run, or a new id if there is none.

    A resumed run continues the store's run.
    """
    with Reader(store) as reader:
        earlier = reader.runs("train")
    return earlier[-1].id if earlier else new_id("run")
