"""The GRPO loop: collect, prepare, update, publish, report and checkpoint, in each step.

Callbacks collect the sessions and publish the weights; the loop itself handles tokens and weights
only. A step is complete when its weights are published. A checkpoint holds completed steps only, so
an interrupted loop resumes from the last of them. The tokens of a step are accounted for only once
its checkpoint is on disk, so a repeated step is accounted for once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from bridle.reconstruct.samples.sample import Episode
from bridle.store.records import PolicyRecord
from bridle.trainer.batch.fates import StepFates, step_fates
from bridle.trainer.batch.prepare import PreparedStep, TrainItem
from bridle.trainer.collection.background import Collect, GroupSource
from bridle.trainer.collection.mixture import ORIGIN, Mixed, Mixture, learn_baselines
from bridle.trainer.collection.renumbering import Renumbering
from bridle.trainer.collection.replay import Replay, ReplayBuffer
from bridle.trainer.config import GrpoConfig
from bridle.trainer.credit.distillation import AskTeacher
from bridle.trainer.learner.checkpoint import (
    CheckpointError,
    Progress,
    checkpoints,
)
from bridle.trainer.learner.optimizer import learning_rate
from bridle.trainer.learner.rates import resolved
from bridle.trainer.learner.scores import merged_scores
from bridle.trainer.learner.trained import TrainedPolicy
from bridle.trainer.learner.update import UpdateStats
from bridle.trainer.losses import entropy
from bridle.trainer.report import StepReport
from bridle.trainer.sinks.base import RunSink

log = logging.getLogger(__name__)


class GrpoLoop:
    """One GRPO run on one machine.

    The ``policies`` are trained on the same sessions, each on its own tokens. The first one's
    packing is the run's, and its checkpoints are written last. All share one version number, which
    the engine serves when :meth:`run` begins: a step that trains one of them publishes all. A token
    that lags behind by some versions therefore lags by as many steps, whichever policy sampled it.
    After :meth:`resume`, publish the weights of each policy as ``loop.version`` first.
    """

    def __init__(
        self,
        config: GrpoConfig,
        policies: Sequence[TrainedPolicy],
        collect: Collect,
        *,
        version: int = 0,
        sinks: RunSink | None = None,
        source: GroupSource | None = None,
        teacher: AskTeacher | None = None,
        load: Callable[[str], Episode] | None = None,
    ) -> None:
        """Create the loop. ``source`` knows the groups that ``collect`` takes.

        ``teacher`` adds to the credit of tokens as ``config.distillation`` says. ``load`` returns a
        session of an earlier step by its id, for success replay.
        """
        self.policies = tuple(policies)
        first, *others = self.policies
        for each in self.policies:
            if (config.loss.kl_coefficient != 0) != each.learner.has_reference:
                raise ValueError("a KL penalty needs a reference model, and a reference model one")
            if (config.distillation.teacher == "ema") != (each.learner.average is not None):
                raise ValueError("a teacher that is an average needs learners that keep one")
        if config.replay.share and load is None:
            raise ValueError("success replay needs a way to load sessions")
        if config.replay.share and others:
            raise ValueError("success replay trains one policy")
        self.config = resolved(first.configured(config))
        self.learner = first.learner
        self.step = 0
        """Number of completed steps."""
        self.seconds = 0.0
        """Seconds that the completed steps took, over all attempts."""
        self.version = version
        """Policy version after the last completed step."""
        self._collect = collect
        self._sinks = sinks
        self._source = source
        self._teacher = teacher
        self._fates: list[StepFates] = []
        """The token fates of the steps since the last checkpoint."""
        self._load = load
        self._trained_groups: Mapping[str, Any] = {}
        """The state of the taken groups as of the last completed step."""
        self.renumbering = Renumbering()
        """The mapping of versions that earlier attempts recorded to present numbers."""
        self.replay_buffer = ReplayBuffer()
        """The replay buffer as of the last completed step."""
        self.mixture: Mixture | None = None
        """The recorded sessions that steps train beside their own; for one policy."""
        self._seconds: dict[str, float] = {}
        self._divergences: dict[str, dict[str, float]] = {}
        """The divergences of the step's updates, by policy."""
        self._updating = False
        """True if the weights may be between two versions."""

    def resume(self) -> Progress:
        """Resume from the newest checkpoint in ``directory``.

        The other policies resume from their checkpoints of the same step. Raises
        :class:`bridle.trainer.learner.checkpoint.CheckpointError` if there is none or it does not
        fit.
        """
        first, *others = self.policies
        found = checkpoints(first.directory)
        if not found:
            raise CheckpointError(f"no checkpoint in {first.directory}")
        for other in others:
            other.load_checkpoint(found[-1].name)
        progress = first.load_checkpoint(found[-1].name)
        self.step, self.version = progress.step, progress.version
        self.seconds = progress.seconds
        self._trained_groups = progress.groups
        self.renumbering = Renumbering(progress.renumbered)
        self.replay_buffer = ReplayBuffer.of_data(progress.replay)
        # The attempt before may have ended between its checkpoint and its account.
        self._account([StepFates.of_data(each) for each in progress.fates])
        return progress

    def renumber(self, version: int) -> None:
        """Give the present weights the number ``version``, which no weights have had before."""
        self.renumbering = self.renumbering.resumed(self.version, version)
        self.replay_buffer = self.replay_buffer.renumbered(version - self.version)
        self.version = version

    def run(self, on_step: Callable[[StepReport], bool | None] = lambda _report: None) -> None:
        """Run steps until the configured steps or time are over, or ``on_step`` returns true.

        The limits are ``config.steps`` and ``config.seconds``. On ``KeyboardInterrupt``, or any
        other error, checkpoint the last completed step if the weights still are that step's.
        Otherwise the newest checkpoint on disk is the one to resume from.
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
        step, version = self.step, self.version
        rate = learning_rate(step, self._steps_in_all(), self.config.optimizer)
        with self._timed("collect"):
            episodes = self._collect(step, version)
        with self._timed("prepare"):
            prepared = [
                each.prepared(
                    episodes,
                    version,
                    each.configured(self.config),
                    self._teacher,
                    self._source.earlier() if self._source is not None else (),
                )
                for each in self.policies
            ]
            replay = self._replay(len(episodes))
            # Success replay and recordings are for one policy.
            replayed = replay.items if replay else ()
            mixed = self._mixed(episodes, prepared[0], replayed)
        updates = [
            self._update(each, (*ready.items, *replayed, *mixed.items), rate)
            for each, ready in zip(self.policies, prepared, strict=True)
        ]
        published: list[PolicyRecord | None] = [None] * len(updates)
        if any(update is not None and update.changed_weights for update in updates):
            version += 1
            with self._timed("publish"):
                published = [
                    each.publish(each.learner, version) if each.publish else None
                    for each in self.policies
                ]
        self.step, self.version, self._updating = step + 1, version, False
        if self._source is not None:
            self._trained_groups = self._source.groups()
        scores = merged_scores(
            part
            for update in updates
            if update is not None and update.changed_weights
            for part in update.scores
        )
        self._fates += step_fates(
            episodes,
            [
                (ready.accounts, update is None or update.changed_weights)
                for ready, update in zip(prepared, updates, strict=True)
            ],
            step=step,
            version=version,
            at=time.time(),
            scores=scores,
        )
        if updates[0] is not None:
            self._fates += step_fates(
                mixed.episodes,
                [(mixed.accounts, updates[0].changed_weights)],
                step=step,
                version=version,
                at=time.time(),
                origin=ORIGIN,
                scores=scores,
            )
        for each in self.policies:
            each.kept_memory = dict(each.memory)
        if replay is not None:
            self.replay_buffer = self.replay_buffer.after(prepared[0], self.config.replay)
        reports = {
            each.name: StepReport(
                *(step, version, len(episodes), ready, update, policy, rate),
                divergences={} if update is None else self._divergences[each.name],
            )
            for each, ready, update, policy in zip(
                self.policies, prepared, updates, published, strict=True
            )
        }
        for name, told in reports.items():
            if (reason := told.nothing_trained) is not None:
                whom = f" of policy {name}" if len(reports) > 1 else ""
                log.warning("step %d trains nothing%s: %s", step + 1, whom, reason)
        report = replace(
            reports.pop(self.policies[0].name),
            replay=replay,
            mixed=mixed if self.mixture else None,
            seconds=dict(self._seconds),
            others=reports,
        )
        if self._sinks is not None:
            self._sinks.write(step, report.metrics())
        return report

    def _update(
        self, policy: TrainedPolicy, items: Sequence[TrainItem], rate: float
    ) -> UpdateStats | None:
        """Take the step's updates of ``policy``. Return ``None`` if there is nothing to train."""
        if not items:
            return None
        self._updating = True
        config = policy.configured(self.config)
        with self._timed("probe"):
            policy.probing.before(policy.learner, items)
        with self._timed("update"):
            update = policy.learner.update(
                items,
                config,
                step=self.step,
                version=self.version,
                learning_rate=rate,
                entropy_bonus=entropy.bonus_of(policy.memory, config.loss),
            )
        with self._timed("probe"):
            self._divergences[policy.name] = policy.probing.after(policy.learner)
        entropy.observe(policy.memory, update.mean_entropy, config.loss)
        self._seconds["score"] = self._seconds.get("score", 0.0) + update.scoring_seconds
        self._seconds["update"] -= update.scoring_seconds
        if update.skipped_updates:
            log.warning(
                "step %d: %d of %d updates were not taken, as their gradients are not finite",
                self.step + 1,
                update.skipped_updates,
                len(update.grad_norms),
            )
        return update

    def _replay(self, sessions: int) -> Replay | None:
        """Draw the replayed sessions of a step with ``sessions`` of its own.

        Return ``None`` if replay is off.
        """
        if self._load is None or not self.config.replay.share:
            return None
        return self.replay_buffer.draw(
            self._load, self.config, step=self.step, version=self.version, sessions=sessions
        )

    def _mixed(
        self, own: Sequence[Episode], prepared: PreparedStep, replayed: Sequence[TrainItem]
    ) -> Mixed:
        """Draw the recorded sessions of a step with the sessions ``own``."""
        if self.mixture is None:
            return Mixed()
        first = self.policies[0]
        learn_baselines(own, prepared, first.memory)
        taken = {item.sample.session_id for item in replayed}
        return self.mixture.draw(
            own, taken, self.config, first.memory, step=self.step, policy=first.name
        )

    def _steps_in_all(self) -> int:
        """Return the number of steps that the run will have at its end.

        It is the configured number, or fewer if the run's time allows no more at the pace so far.
        """
        if self.config.seconds is None or self.seconds == 0:
            return self.config.steps
        pace = self.seconds / self.step
        affordable = round(self.config.seconds / pace)
        return min(self.config.steps, max(self.step, affordable))

    def _checkpoint_due(self) -> bool:
        return self.step % self.config.checkpoints.every == 0

    def _checkpoint(self) -> int:
        progress = Progress(
            self.step,
            self.version,
            self.seconds,
            self._trained_groups,
            self.renumbering.changes,
            replay=self.replay_buffer.as_data(),
            fates=[each.as_data() for each in self._fates],
        )
        first, *others = self.policies
        keep = self.config.checkpoints.keep
        for other in others:
            # One more: the first policy's, which comes last, says what there is to go on from.
            other.save_checkpoint(progress, keep + 1)
        first.save_checkpoint(progress, keep)
        self._account(self._fates)
        self._fates = []
        return self.step

    def _account(self, fates: Sequence[StepFates]) -> None:
        if self._sinks is not None:
            self._sinks.account(fates)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started
