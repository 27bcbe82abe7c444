"""A GRPO run: it collects sessions through the proxy, updates, and publishes weights to the engine.

The caller runs the sessions (:mod:`bridle.run.rollouts`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bridle.errors import BridleError, UsageError
from bridle.harnesses.given import GivenRewards
from bridle.reconstruct.episodes import broken_episode, episode_of
from bridle.reconstruct.samples.rules import SampleRules
from bridle.reconstruct.samples.sample import Episode
from bridle.reconstruct.session import LoadedSession
from bridle.reconstruct.tree import BrokenTree
from bridle.registry import require_parts as require_named
from bridle.run.distillation import informer, require_teacher, teaching
from bridle.run.evaluation import HeldOut, keep_best
from bridle.run.groups import FINISHED
from bridle.run.publishing import AnyPublisher, publishing
from bridle.run.report import evaluation_metrics
from bridle.run.rollouts import NO_CALL_HINT
from bridle.run.stack import Stack
from bridle.run.training_plan import TrainingPlan, configured, rules_of
from bridle.store.reading.queries import Reader
from bridle.store.writing.writer import Writer
from bridle.trainer.batch.trial import require_credit_and_filters
from bridle.trainer.collection.background import BackgroundCollector, StartGroup
from bridle.trainer.collection.mixture import Mixture
from bridle.trainer.collection.sessions import collector_of
from bridle.trainer.config import GrpoConfig
from bridle.trainer.credit import ADVANTAGES
from bridle.trainer.credit.anchors import ANCHORS
from bridle.trainer.filters import FILTERS
from bridle.trainer.learner.checkpoint import POLICY_DIRECTORY, checkpoints
from bridle.trainer.learner.optimizer import OPTIMIZERS
from bridle.trainer.learner.ranks import learning
from bridle.trainer.learner.trained import TrainedPolicy
from bridle.trainer.learner.world import World
from bridle.trainer.loop import GrpoLoop
from bridle.trainer.losses.importance import CORRECTIONS
from bridle.trainer.losses.losses import LOSSES
from bridle.trainer.losses.trial import require_loss
from bridle.trainer.losses.trust import TRUST_REGIONS
from bridle.trainer.policy.compute import UnsupportedCompute, choose_devices
from bridle.trainer.report import StepReport
from bridle.trainer.sinks import SINKS, SinkGroup, StoreSink, TrackedRun, require_sink

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"


def require_parts(config: GrpoConfig, payload: Mapping[str, Any] | None = None) -> None:
    """Raise :class:`bridle.errors.UsageError` for a part of ``config`` that cannot be used.

    The error is raised if ``config`` names an advantage, anchor, loss, importance correction, trust
    region, filter, sink or optimizer that does not exist, or an option that such a part does not
    have. It is also raised for a loss that fails on made-up tokens, for another part that fails on
    made-up sessions of a task with ``payload``, and for a teacher that cannot be asked.
    """
    advantages = config.advantages
    chosen = (ADVANTAGES, advantages.baseline), (ANCHORS, advantages.anchor)
    require_named(advantages.options, *chosen)
    require_named(
        config.loss.options,
        (LOSSES, config.loss.name),
        (CORRECTIONS, config.loss.importance),
        (TRUST_REGIONS, config.loss.trust_region),
    )
    require_loss(config.loss)
    require_named(config.filters.options, *((FILTERS, name) for name in config.filters.extra))
    OPTIMIZERS.get(config.optimizer.name)
    for name in config.sinks:
        require_sink(name)
    require_teacher(config.distillation)
    require_credit_and_filters(config, payload)


def require_devices(config: GrpoConfig) -> None:
    """Raise an error for devices of ``config`` that are not here, or that cannot train so.

    The error is ``UnsupportedCompute``.
    """
    devices = choose_devices(config.compute.device)
    if len(devices) > 1 and config.publish.through == "transfer":
        raise UnsupportedCompute(
            "weights are transferred from one device: publish through directories, or train on one"
        )


def require_several(config: GrpoConfig) -> None:
    """Raise :class:`bridle.errors.UsageError` for settings that only work with one policy."""
    if config.replay.share:
        raise UsageError("success replay is for one policy: set training.replay.share to 0")
    if World.current().size > 1 or len(choose_devices(config.compute.device)) > 1:
        raise UsageError("several policies are trained on one device: set training.compute.device")


def train(
    plan: TrainingPlan,
    stack: Stack,
    groups: StartGroup,
    *,
    on_step: Callable[[StepReport], bool | None],
    held_out: HeldOut | None = None,
    given: GivenRewards | None = None,
    further: Mapping[str, Stack] = MappingProxyType({}),
) -> GrpoLoop:
    """Run or resume ``plan``.

    Return the loop, whose learner is closed if it was spread over devices.

    ``groups`` starts the sessions of a group. ``stack`` must serve ``plan.policy``, or a version of
    it that an earlier attempt published; so must ``further``, by name, each of ``plan.others``. A
    resumed run publishes its own weights first. ``on_step`` may return true to stop. An interrupt
    leaves a checkpoint of the last whole step. ``held_out`` measures the policies before the first
    step and on the way; the best are kept. ``given`` are the rewards that the run sent: a session
    with other rewards in the store ends the step. Raise
    :class:`bridle.harnesses.given.RewardsDiffer`,
    :class:`bridle.trainer.policy.compute.UnsupportedCompute`, and the errors of its parts.
    """
    require_parts(plan.config)
    require_devices(plan.config)
    rules = rules_of(plan.config)

    def load(session_id: str) -> Episode:
        return loop.renumbering.episode(loaded_episode(reader, session_id, rules, given))

    with (
        resumable(),
        teaching(plan.config.distillation) as teacher,
        Reader(plan.store) as reader,
        Writer(plan.store) as writer,
        ExitStack() as opened,
        sinks_of(plan, writer) as sinks,
        collector_of(
            groups,
            load,
            plan.config,
            per_step=plan.groups_per_step,
            group_size=plan.group_size,
        ) as collector,
    ):
        stacks = {plan.name: stack, **further}
        served = [
            opened.enter_context(_serving(each, stacks[each.name], writer)) for each in plan.each
        ]
        writer.configure_run(plan.run_id, configured(plan))
        attempt = _Attempt(plan, served, collector, reader, writer, held_out)
        loop = GrpoLoop(
            plan.config,
            [one.trained for one in served],
            attempt.collect,
            version=0,
            sinks=sinks,
            source=collector,
            teacher=teacher,
            load=load,
        )
        loop.mixture = opened.enter_context(_mixture(plan, rules))
        attempt.begin(loop)

        def after_step(report: StepReport) -> bool | None:
            attempt.step_ended(loop, report)
            return on_step(report)

        loop.run(after_step)
    return loop


@dataclass(frozen=True, slots=True)
class _Attempt:
    """An attempt at a plan, which collects for its loop and watches over its engines."""

    plan: TrainingPlan
    served: Sequence[_Served]
    collector: BackgroundCollector
    reader: Reader
    writer: Writer
    held_out: HeldOut | None

    @property
    def on_policy(self) -> bool:
        return self.plan.config.max_staleness == 0

    def begin(self, loop: GrpoLoop) -> None:
        """Resume from the newest checkpoint if there is one, and have its version served."""
        known = [policy.version for policy in self.reader.policies(self.plan.run_id)]
        newest = max([one.stack.version() for one in self.served] + known)
        if checkpoints(self.served[0].trained.directory):
            progress = loop.resume()
            self.collector.restore(progress.groups, progress.step)
        else:
            for each in self.plan.each:
                self.writer.add_sync(each.beginning)
        if newest > loop.version:
            # Published by an attempt that ended before its checkpoint, or for another run. A
            # version stands for one set of weights, so these get the next number.
            loop.renumber(newest + 1)
        if loop.version or self.plan.config.publish.through == "lora":
            # An engine that serves adapters has none of the run's before that.
            for one in self.served:
                one.publisher.publish(one.trained.learner, loop.version)
        elif not self.on_policy:
            # On policy, the first collection does this.
            self._hold(0)
        if loop.step == 0:
            self._measure(-1, loop.version)

    def collect(self, step: int, version: int) -> list[Episode]:
        if self.on_policy:
            # Nothing else moves meanwhile, so that a restart of engine or proxy shows.
            self._hold(version)
        collected = self.collector(step, version)
        if any(each.session.outcome not in FINISHED for each in collected):
            # Some have no verdict: is that the engine's fault, or the proxy's? If so the step is
            # not taken, and their groups are completed by the next attempt.
            self._hold(version)
        ids = [episode.session.id for episode in collected]
        if ids and not any(self.reader.call_counts_of(ids).values()):
            log.warning("step %d: no session has a call (%s)", step + 1, NO_CALL_HINT)
        return collected

    def step_ended(self, loop: GrpoLoop, report: StepReport) -> None:
        """Watch over the engines, and measure the policies if it is time."""
        config = self.plan.config
        if not self.on_policy and (report.policy is None or config.publish.through == "transfer"):
            # A restarted engine or proxy answers no call. Without calls there is nothing to train
            # on, and so no publish that would notice. A vLLM that dies before a version's directory
            # is written comes back with the version before.
            self._hold(loop.version)
        self.collector.published(loop.version)
        if self.held_out is not None and self.held_out.is_due(report.step + 1, config.steps):
            self._measure(report.step, loop.version)

    def _hold(self, version: int) -> None:
        for one in self.served:
            one.hold(version)

    def _measure(self, step: int, version: int) -> None:
        measured = self.held_out.measure(self.reader, version) if self.held_out else None
        if measured is not None:
            log.info("step %d: held-out reward %s", step + 1, measured.mean_at[1])
            self.writer.record_metrics(self.plan.run_id, step, evaluation_metrics(measured))
            for one in self.served:
                learner, where = one.trained.learner, one.plan
                keep_best(where.directory, measured, version, learner, where.policy)


@dataclass(frozen=True, slots=True)
class _Served:
    """A policy in training, with the stack that serves it."""

    plan: TrainingPlan
    stack: Stack
    trained: TrainedPolicy
    publisher: AnyPublisher

    def hold(self, version: int) -> None:
        """Publish ``version`` again if the engine or the proxy no longer has it."""
        learner = self.trained.learner
        if self.stack.version() != version or not self.publisher.serves(learner):
            log.warning(
                "the engine or the proxy was restarted or left paused, or engine and trainer score "
                "differently: publishing version %d again",
                version,
            )
            self.publisher.publish(learner, version)


@contextmanager
def _serving(plan: TrainingPlan, stack: Stack, writer: Writer) -> Iterator[_Served]:
    with (
        learning(plan.policy, plan.config) as learner,
        publishing(plan, stack, learner, writer) as publisher,
    ):
        directory = plan.directory / CHECKPOINTS
        trained = TrainedPolicy(
            learner,
            directory,
            publisher.publish,
            plan.policy,
            plan.name,
            inform=informer(plan.config.distillation, plan.policy),
        )
        yield _Served(plan, stack, trained, publisher)


@contextmanager
def _mixture(plan: TrainingPlan, rules: SampleRules) -> Iterator[Mixture | None]:
    """Yield the selection of recorded sessions beside the run's own, or ``None`` without one."""
    stated = plan.recordings
    if stated is None:
        yield None
        return
    with Reader(stated.store or plan.store) as reader:
        yield Mixture(
            lambda: (
                one
                for one in reader.sessions(run=stated.run, where=stated.where, sealed=True)
                if one.run_id != plan.run_id
            ),
            lambda session_id: loaded_episode(reader, session_id, rules),
            stated.share,
            stated.per_task,
        )


@contextmanager
def sinks_of(plan: TrainingPlan, writer: Writer) -> Iterator[SinkGroup]:
    """Yield the sinks that receive the numbers of a run."""
    run = TrackedRun(plan.run_id, plan.directory, configured(plan))
    opened = [SINKS.get(name)(run) for name in plan.config.sinks]
    sinks = SinkGroup(StoreSink(writer, plan.run_id), opened)
    try:
        yield sinks
    finally:
        sinks.close()


@contextmanager
def resumable() -> Iterator[None]:
    """Add the remedy to an error that ends a run."""
    try:
        yield
    except BridleError as error:
        error.add_note("the same command resumes from the last step")
        raise


def loaded_episode(
    reader: Reader, session_id: str, rules: SampleRules, given: GivenRewards | None = None
) -> Episode:
    """Return the episode of a session.

    If its record contradicts itself, it has no samples, and its tokens are dropped as
    ``tree_broken``. Raise :class:`bridle.harnesses.given.RewardsDiffer`.
    """
    session = LoadedSession.load(reader, session_id)
    if given is not None and session.record.outcome in FINISHED:
        if not given.knows(session_id):
            log.warning("session %s: its rewards were given in elsewhere: unchecked", session_id)
        given.require(session_id, session.all_rewards)
    try:
        return episode_of(session, rules)
    except BrokenTree as error:
        log.warning(
            "session %s contradicts itself and is not trained on: %s; `bridle audit` says where",
            session_id,
            error,
        )
    return broken_episode(session)


def newest_policy(plan: TrainingPlan) -> Path:
    return checkpoints(plan.directory / CHECKPOINTS)[-1] / POLICY_DIRECTORY


def step_line(report: StepReport) -> str:
    spent = ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in report.seconds.items())
    reached = f"reward {report.reward_mean:.3f}, version {report.version}"
    return f"step {report.step + 1}: {reached}, {spent}"
