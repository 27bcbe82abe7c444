"""GRPO on sessions that are recorded already; no agent runs, and no engine is needed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

import numpy as np
from msgspec import structs

from bridle.errors import BridleError
from bridle.reconstruct.rewards import RewardNotice
from bridle.reconstruct.samples.sample import Episode, Sample
from bridle.run.config import RecordingsConfig
from bridle.run.distillation import informer, teaching
from bridle.run.publishing import publishing
from bridle.run.stack import Stack
from bridle.run.training import (
    CHECKPOINTS,
    loaded_episode,
    require_devices,
    require_parts,
    resumable,
    sinks_of,
)
from bridle.run.training_plan import TrainingPlan, configured, rules_of
from bridle.store.reading.queries import Reader
from bridle.store.records import PLAIN, SessionRecord
from bridle.store.writing.writer import Writer
from bridle.trainer.batch.own_tokens import of_policy
from bridle.trainer.batch.prepare import compared_by
from bridle.trainer.collection.recorded import NothingRecorded, RecordedGroups
from bridle.trainer.credit.rewards import aggregation
from bridle.trainer.learner.checkpoint import checkpoints
from bridle.trainer.learner.learner import AnyLearner
from bridle.trainer.learner.ranks import learning
from bridle.trainer.learner.trained import TrainedPolicy
from bridle.trainer.loop import GrpoLoop
from bridle.trainer.report import StepReport

log = logging.getLogger(__name__)

CHECKED_SESSIONS: Final = 8
"""The number of sessions that are scored before training to check that they were drawn from the
policy."""
GAP_LIMIT: Final = 0.25
"""The largest mean difference of logprobs in nats. Engines and trainers of one policy differ by 0.1
if they round to 16 bits. Two policies, or two versions of one after a few updates at a high rate,
differ by more than this limit."""


class OtherPolicy(BridleError):
    """The recorded sessions were not drawn from the policy that is to be trained."""


def train_recorded(
    plan: TrainingPlan,
    recordings: RecordingsConfig,
    *,
    stack: Stack | None = None,
    on_step: Callable[[StepReport], bool | None],
    on_rule: Callable[[str], None] = log.info,
) -> GrpoLoop:
    """Train ``plan.policy`` on recorded sessions, each group once, or resume such a run.

    Of sessions with several policies, the tokens of ``plan.name`` are trained.

    Without ``recordings.wait_for`` the run ends after the groups that are there, or after
    ``plan.config.steps``. A ``max_staleness`` of 0 stands for one pass: tokens of
    ``recordings.version`` and later are trained at any step. With a ``stack``, each version is
    published to its engines. ``on_rule`` is called once with a line about which rewards make a
    session's number. Raise :class:`NothingRecorded`, :class:`OtherPolicy`, and the errors of its
    parts.
    """
    require_parts(plan.config)
    require_devices(plan.config)
    rules = rules_of(plan.config)
    rule, notice = aggregation(plan.config.advantages), RewardNotice(on_rule)

    def load(session_id: str) -> Episode:
        episode = loaded_episode(reader, session_id, rules)
        notice(rule, episode.rewards)
        return episode

    with (
        resumable(),
        teaching(plan.config.distillation) as teacher,
        learning(plan.policy, plan.config) as learner,
        Reader(plan.store) as reader,
        Writer(plan.store) as writer,
        ExitStack() as opened,
    ):
        publisher = None
        if stack is not None:
            publisher = opened.enter_context(publishing(plan, stack, learner, writer))
        groups = RecordedGroups(
            lambda: _sealed(reader, recordings),
            load,
            plan.groups_per_step,
            oldest=recordings.version - plan.config.max_staleness,
            complete=recordings.wait_for,
            is_rewarded=lambda session: _is_rewarded(reader, session, plan),
        )
        directory = plan.directory / CHECKPOINTS
        publish = publisher.publish if publisher else None
        inform = informer(plan.config.distillation, plan.policy)
        loop = GrpoLoop(
            plan.config,
            [TrainedPolicy(learner, directory, publish, plan.policy, plan.name, inform=inform)],
            groups,
            version=recordings.version,
            sinks=opened.enter_context(sinks_of(plan, writer)),
            source=groups,
            teacher=teacher,
            load=lambda session_id: groups.episode(session_id, loop.version),
        )
        if checkpoints(directory):
            groups.restore(loop.resume().groups)
        elif not recordings.other_policy and recordings.wait_for is None:
            own = [of_policy(one, plan.name) for one in groups.first(CHECKED_SESSIONS)]
            require_own_policy(learner, own, recordings.version)
        writer.configure_run(plan.run_id, configured(plan))
        if loop.step == 0:
            writer.add_sync(replace(plan.beginning, version=loop.version))
        if recordings.wait_for is None:
            left = groups.steps()
            if loop.step + left == 0:
                raise NothingRecorded(
                    "the selection takes no sealed session: `bridle sessions` lists what there is"
                )
            loop.config = replace(loop.config, steps=min(loop.config.steps, loop.step + left))
        if plan.config.max_staleness == 0:
            # What the policy drew is not newer for waiting its turn.
            loop.config = replace(loop.config, max_staleness=loop.config.steps)
        loop.run(on_step)
    return loop


def require_own_policy(learner: AnyLearner, episodes: list[Episode], version: int) -> None:
    """Raise :class:`OtherPolicy` unless the policy drew the tokens recorded at ``version``."""
    samples = [
        sample
        for episode in episodes
        for sample in episode.samples
        if bool((sample.mask & (sample.versions == version)).any()) and _is_plain(sample)
    ]
    if not samples:
        log.warning(
            "no recorded token of version %d can be compared with the policy: name the version "
            "that --policy is with --set recordings.version=N",
            version,
        )
        return
    scores = learner.scores([sample.token_ids.astype(np.int64) for sample in samples])
    gaps = []
    for sample, scored in zip(samples, scores, strict=True):
        own = np.flatnonzero(sample.mask & (sample.versions == version))
        gaps.append(np.abs(scored[own - 1] - sample.logprobs[own]))
    gap = float(np.concatenate(gaps).mean())
    if gap > GAP_LIMIT:
        raise OtherPolicy(
            f"these sessions were drawn from other weights than --policy: their logprobs differ by "
            f"{gap:.2f} nats a token. Name the policy that recorded them, and its version with "
            "--set recordings.version=N, or train them anyway with "
            "--set recordings.other_policy=true"
        )


def _is_plain(sample: Sample) -> bool:
    """Return whether every call drew from the policy's own distribution.

    This is the distribution that the policy scores.
    """
    return all(
        sampler is None or structs.replace(sampler, logprobs=PLAIN.logprobs) == PLAIN
        for sampler in sample.samplers
    )


def _sealed(reader: Reader, recordings: RecordingsConfig) -> Iterator[SessionRecord]:
    return reader.sessions(run=recordings.run, where=recordings.where, sealed=True)


def _is_rewarded(reader: Reader, session: SessionRecord, plan: TrainingPlan) -> bool:
    stated = plan.config.advantages
    numbers = aggregation(stated).numbers(reader.rewards(session.id))
    return compared_by(numbers, stated) is not None
