"""The GRPO loop: collect, prepare, update, publish, report, checkpoint; again.

How sessions are collected and where weights go are callbacks: the loop knows tokens and weights
only. A step is complete when its weights are published; a checkpoint holds completed steps only, so
that whatever interrupts the loop, it goes on from the last of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from bridle.reconstruct.samples.sample import Episode
from bridle.store.records import PolicyRecord
from bridle.trainer.batch.prepare import prepare
from bridle.trainer.collection.collector import Collect
from bridle.trainer.collection.renumbering import Renumbering
from bridle.trainer.collection.replay import Replay, ReplayBuffer
from bridle.trainer.config import GrpoConfig
from bridle.trainer.credit.distillation import AskTeacher
from bridle.trainer.learner.checkpoint import (
    CheckpointError,
    Progress,
    checkpoints,
)
from bridle.trainer.learner.learner import AnyLearner
from bridle.trainer.learner.optimizer import learning_rate
from bridle.trainer.policy.weights import Policy
from bridle.trainer.report import StepReport
from bridle.trainer.sinks.base import MetricSink

log = logging.getLogger(__name__)


class Publish(Protocol):
    def __call__(self, policy: Policy, version: int) -> PolicyRecord | None:
        """Make the engine serve ``policy`` as ``version``; raise when it does not.

        :meth:`trainer.publish.Publisher.publish` is one.
        """


class GrpoLoop:
    """One GRPO run on one machine.

    ``learner`` holds the weights of policy version ``version``, which the engine serves when
    :meth:`run` begins; after :meth:`resume`, publish ``loop.learner`` as ``loop.version`` first.
    ``directory`` receives the checkpoints.
    """

    def __init__(
        self,
        config: GrpoConfig,
        learner: AnyLearner,
        collect: Collect,
        *,
        directory: Path,
        publish: Publish | None = None,
        metrics: MetricSink | None = None,
        tokenizer_from: Path | None = None,
        version: int = 0,
        groups: Callable[[], Mapping[str, Any]] = dict,
        teacher: AskTeacher | None = None,
        load: Callable[[str], Episode] | None = None,
    ) -> None:
        """``groups``: what checkpoints keep of the groups that have been taken. ``teacher`` adds to
        their credit as ``config.distillation`` says. ``load``: a session of an earlier step by its
        id, for success replay."""
        if (config.loss.kl_coefficient != 0) != learner.has_reference:
            raise ValueError("a KL penalty needs a reference model, and a reference model one")
        if config.replay.share and load is None:
            raise ValueError("success replay needs a way to load sessions")
        self.config = replace(config, packing=learner.packing)
        self.learner = learner
        self.step = 0
        """Steps completed."""
        self.seconds = 0.0
        """What they took, over all attempts."""
        self.version = version
        """Policy version of ``learner`` after the last completed step."""
        self._directory = directory
        self._collect = collect
        self._publish = publish
        self._metrics = metrics
        self._tokenizer_from = tokenizer_from
        self._groups = groups
        self._teacher = teacher
        self._load = load
        self._trained_groups: Mapping[str, Any] = {}
        """As of the last completed step, as what follows."""
        self._kept_memory: Mapping[str, float] = {}
        self.memory: dict[str, float] = {}
        """What estimators keep over the steps."""
        self.renumbering = Renumbering()
        """How versions that were recorded by earlier attempts count now."""
        self.replay_buffer = ReplayBuffer()
        """As of the last completed step."""
        self._seconds: dict[str, float] = {}
        self._updating = False
        """Whether the weights may be between two versions."""

    def resume(self) -> Progress:
        """Go on from the newest checkpoint in ``directory``.

        Raises :class:`bridle.trainer.learner.checkpoint.CheckpointError` when there is none or it
        does not fit.
        """
        found = checkpoints(self._directory)
        if not found:
            raise CheckpointError(f"no checkpoint in {self._directory}")
        progress = self.learner.load_checkpoint(found[-1])
        self.step, self.version = progress.step, progress.version
        self.seconds = progress.seconds
        self._trained_groups, self._kept_memory = progress.groups, progress.memory
        self.renumbering = Renumbering(progress.renumbered)
        self.memory = dict(progress.memory)
        self.replay_buffer = ReplayBuffer.of_data(progress.replay)
        return progress

    def renumber(self, version: int) -> None:
        """The weights count as ``version`` from now on, a number that nothing has had."""
        self.renumbering = self.renumbering.resumed(self.version, version)
        self.replay_buffer = self.replay_buffer.renumbered(version - self.version)
        self.version = version

    def run(self, on_step: Callable[[StepReport], bool | None] = lambda _report: None) -> None:
        """Steps until ``config.steps`` are complete, ``config.seconds`` are over, or ``on_step``
        returns true.

        On ``KeyboardInterrupt``, or any other error, the last completed step is checkpointed if
        the weights still are that step's; otherwise its checkpoint is the newest on disk.
        """
        saved = self.step
        try:
            while self.step < self._steps_in_all():
                started = time.perf_counter()
                report = self._run_step()
                stop = on_step(report)
                self.seconds += time.perf_counter() - started
                if stop or self.step == self._steps_in_all() or self._checkpoint_due():
                    saved = self._checkpoint()
                if stop:
                    break
        finally:
            if not self._updating and saved != self.step:
                self._checkpoint()

    def _run_step(self) -> StepReport:
        self._seconds = {}
        step = self.step
        rate = learning_rate(step, self._steps_in_all(), self.config.optimizer)
        with self._timed("collect"):
            episodes = self._collect(step, self.version)
        with self._timed("prepare"):
            prepared = prepare(episodes, self.version, self.config, self.memory, self._teacher)
            replay = self._replay(len(episodes))
        items = (*prepared.items, *(replay.items if replay else ()))
        update = policy = None
        version = self.version
        if items:
            self._updating = True
            with self._timed("update"):
                update = self.learner.update(
                    items, self.config, step=step, version=version, learning_rate=rate
                )
            self._seconds["score"] = update.scoring_seconds
            self._seconds["update"] -= update.scoring_seconds
            if update.skipped_updates:
                log.warning(
                    "step %d: %d of %d updates were not taken, as their gradients are not finite",
                    step + 1,
                    update.skipped_updates,
                    len(update.grad_norms),
                )
            if update.skipped_updates < len(update.grad_norms):
                version += 1
                with self._timed("publish"):
                    policy = self._publish(self.learner, version) if self._publish else None
        self.step, self.version, self._updating = step + 1, version, False
        self._trained_groups, self._kept_memory = self._groups(), dict(self.memory)
        if replay is not None:
            self.replay_buffer = self.replay_buffer.after(prepared, self.config.replay)
        report = StepReport(
            step=step,
            version=version,
            sessions=len(episodes),
            prepared=prepared,
            replay=replay,
            update=update,
            policy=policy,
            learning_rate=rate,
            seconds=dict(self._seconds),
        )
        if (reason := report.nothing_trained) is not None:
            log.warning("step %d trains nothing: %s", step + 1, reason)
        if self._metrics is not None:
            self._metrics.write(step, report.metrics())
        return report

    def _replay(self, sessions: int) -> Replay | None:
        """What the step trains besides ``sessions`` of its own; ``None``: replay is off."""
        if self._load is None or not self.config.replay.share:
            return None
        return self.replay_buffer.draw(
            self._load, self.config, step=self.step, version=self.version, sessions=sessions
        )

    def _steps_in_all(self) -> int:
        """Steps that the run will have had at its end: as configured, or as its time allows at the
        pace so far."""
        if self.config.seconds is None or self.seconds == 0:
            return self.config.steps
        pace = self.seconds / self.step
        affordable = round(self.config.seconds / pace)
        return min(self.config.steps, max(self.step, affordable))

    def _checkpoint_due(self) -> bool:
        return self.step % self.config.checkpoints.every == 0

    def _checkpoint(self) -> int:
        self.learner.save_checkpoint(
            self._directory,
            Progress(
                self.step,
                self.version,
                self.seconds,
                self._trained_groups,
                self.renumbering.changes,
                self._kept_memory,
                self.replay_buffer.as_data(),
            ),
            tokenizer_from=self._tokenizer_from,
            keep=self.config.checkpoints.keep,
        )
        return self.step

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[phase] = time.perf_counter() - started
