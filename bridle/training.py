"""A GRPO run with rollouts: harness sessions through the proxy, updates, weights to the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bridle.rollouts import Rollouts
from bridle.stack import Stack
from harnesses.adapters.base import Adapter
from harnesses.rollout import Job, RolloutResult, Settings
from reconstruct.episodes import build_episode
from reconstruct.samples import Episode
from store.queries import Reader
from store.records import PolicyRecord
from store.writer import Writer
from trainer.checkpoint import checkpoints
from trainer.config import GrpoConfig, PublishConfig
from trainer.loop import GrpoLoop
from trainer.metrics import SinkGroup, StoreSink, TensorBoardSink
from trainer.model import load_policy, vocabulary_size
from trainer.publish import Publisher, default_probes
from trainer.report import StepReport


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """What to train, on what, and where everything goes."""

    policy: Path
    """Model directory of version 0."""
    directory: Path
    """Receives ``checkpoints/``, ``published/`` and ``tensorboard/``."""
    store: str
    run_id: str
    """The run in the store under which sessions, metrics and policies are kept."""
    config: GrpoConfig
    adapter: Adapter
    jobs: Callable[[int], Sequence[Job]]
    """The sessions of a step, by its number."""
    rollout: Settings
    publish: PublishConfig = field(default_factory=PublishConfig)


def train(
    plan: TrainingPlan,
    stack: Stack,
    rollouts: Rollouts,
    *,
    on_step: Callable[[StepReport], bool | None],
    on_session: Callable[[RolloutResult], None] | None = None,
) -> GrpoLoop:
    """Runs or resumes ``plan``; returns the loop, whose model holds the last weights.

    ``stack`` must serve ``plan.policy``; a resumed run publishes its own weights to it first.
    ``on_step`` may return true to stop. Interrupting leaves a checkpoint of the last whole step.
    """
    model = load_policy(plan.policy)
    loop_directory = plan.directory / "checkpoints"
    with Reader(plan.store) as reader, Writer(plan.store) as writer:

        def collect(step: int, version: int) -> list[Episode]:
            results = rollouts.collect(plan.adapter, plan.jobs(step), plan.rollout, on_session)
            found = [result.session_id for result in results if result.session_id]
            return [build_episode(reader, session_id) for session_id in found]

        with stack.engine() as engine:
            publisher = Publisher(
                engine,
                plan.directory / "published",
                run_id=plan.run_id,
                served=plan.policy,
                served_version=0,
                probes=default_probes(vocabulary_size(model)),
                config=plan.publish,
                announce=stack.announce,
                record=writer.record_policy,
            )
            sinks = SinkGroup([TensorBoardSink(plan.directory / "tensorboard")])
            loop = GrpoLoop(
                plan.config,
                model,
                collect,
                directory=loop_directory,
                publish=publisher.publish,
                metrics=SinkGroup([sinks, StoreSink(writer, plan.run_id)]),
                tokenizer_from=plan.policy,
            )
            if checkpoints(loop_directory):
                loop.resume()
                if loop.version:
                    publisher.publish(model, loop.version)
            else:
                writer.record_policy(
                    PolicyRecord(plan.run_id, 0, time.time(), path=str(plan.policy))
                )
            try:
                loop.run(on_step)
            finally:
                sinks.close()
    return loop
