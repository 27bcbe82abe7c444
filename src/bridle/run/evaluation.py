"""Measure an agent on tasks: through a running proxy, or at intervals while it is trained."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
import orjson

from bridle.harnesses.adapters.base import Adapter
from bridle.harnesses.rollout import Job, RolloutResult, RolloutSettings
from bridle.harnesses.tasks import Task
from bridle.harnesses.verifiers import Delivery, Judgement, Verifier
from bridle.reconstruct.evaluation import (
    MEASURED,
    Attempt,
    Evaluation,
    attempts_of,
    evaluated,
    judged,
)
from bridle.reconstruct.rewards import Aggregation
from bridle.run.environment import admin_key_for, default_proxy
from bridle.run.groups import key_of
from bridle.run.rollouts import Rollouts, rollout
from bridle.store.reading.queries import Reader
from bridle.store.records import SessionRecord

if TYPE_CHECKING:
    from bridle.trainer.policy.weights import Weights

log = logging.getLogger(__name__)

BEST: Final = "best"
"""The folder of the best checkpoint, below a run's output."""
FIGURES: Final = "evaluation.json"
SCORES: Final = Aggregation()
"""The rule that makes a rollout's scores one number for each session."""
VERSION_LABEL: Final = "evaluates"
"""The label of a held-out session with the policy version that it measures."""


def evaluate(
    agent: str | Adapter,
    tasks: str | Iterable[Task],
    verifier: str | Verifier | Callable[[Delivery], Judgement | Awaitable[Judgement]],
    *,
    samples: int = 1,
    proxy: str | None = None,
    key: str | None = None,
    directory: str | Path = "runs/eval",
    **options: Any,
) -> list[Attempt]:
    """Run an agent ``samples`` times on each task through a running proxy, and return the attempts.

    The options are those of :func:`bridle.run.rollouts.rollout`.
    :func:`bridle.reconstruct.evaluation.evaluated` computes the figures of the attempts. An attempt
    has the policy version that the proxy served at the start. Sessions without a verdict are left
    out, with a warning.
    """
    url = proxy or default_proxy()
    key = admin_key_for(url, key)
    version = _served(url, key)
    results = rollout(
        agent,
        tasks,
        verifier,
        proxy=url,
        key=key,
        group_size=samples,
        directory=directory,
        held_out=True,
        **options,
    )
    name = agent if isinstance(agent, str) else agent.name
    return attempts_in(results, name, version)


def attempts_in(
    results: Sequence[RolloutResult], harness: str, version: int | None
) -> list[Attempt]:
    """Return the attempts among ``results``, which are those with a verdict."""
    attempts = []
    for result in results:
        numbers = judged(result.outcome, result.rewards, SCORES)
        if numbers is not None:
            own = (numbers.reward, harness, version, numbers.success)
            attempts.append(Attempt(result.task_id, *own))
    if lost := len(results) - len(attempts):
        log.warning("%d of %d sessions have no verdict and are left out", lost, len(results))
    return attempts


def _served(proxy: str, key: str | None) -> int | None:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    reply = httpx.get(f"{proxy}/bridle/v1/policy", headers=headers, trust_env=False)
    return int(reply.json()["version"]) if reply.is_success else None


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The tasks on which a run is measured, and how; their sessions are not trained."""

    rollouts: Rollouts
    adapter: Adapter
    tasks: Sequence[Task]
    settings: RolloutSettings
    run_id: str
    """The id of the evaluation's own run in the store."""
    every: int
    """Number of steps between measurements."""
    samples: int = 1
    """Number of sessions per task."""
    success: float = 1.0

    def is_due(self, step: int, steps: int) -> bool:
        """Return whether to measure when ``step`` of ``steps`` steps are complete."""
        return step % self.every == 0 or step == steps

    def measure(self, reader: Reader, version: int) -> Evaluation | None:
        """Measure the policy that is served now as ``version``, and return the figures.

        Return ``None`` if no session has a verdict. Sessions of this version from an earlier
        attempt at the run are not run again.
        """

        def mine(session: SessionRecord) -> bool:
            return session.labels.get(VERSION_LABEL) == version

        done = Counter(one.task for one in attempts_of(reader, run=self.run_id, wanted=mine))
        jobs = [
            Job(task, f"{self.run_id}.{version}.{task.id}")
            for task in self.tasks
            for _ in range(self.samples - done[key_of(task)])
        ]
        settings = replace(self.settings, run_id=self.run_id, labels={VERSION_LABEL: version})
        self.rollouts.collect(self.adapter, jobs, settings)
        for session in filter(mine, reader.sessions(run=self.run_id)):
            if session.outcome in MEASURED:
                self.rollouts.given.require(session.id, reader.rewards(session.id))
        attempts = attempts_of(reader, run=self.run_id, wanted=mine)
        if not attempts:
            log.warning("version %d is not measured: no held-out session has a verdict", version)
            return None
        return evaluated(attempts, sorted({1, self.samples}), self.success)


def keep_best(
    directory: Path, measured: Evaluation, version: int, policy: Weights, tokenizer: Path
) -> bool:
    """Save ``policy`` below ``directory`` unless an earlier measurement was as good.

    Return whether it was saved.

    The folder appears by one rename; it holds a model directory and :data:`FIGURES`.
    """
    from bridle.trainer.policy.durable import atomic_directory

    reward = measured.mean_at[1].value
    best = directory / BEST
    if (best / FIGURES).exists():
        earlier = orjson.loads((best / FIGURES).read_bytes())
        if earlier["reward"] >= reward:
            return False
    figures = {"version": version, "reward": reward, **measured.as_data()}
    with atomic_directory(best) as scratch:
        policy.save(scratch, tokenizer)
        (scratch / FIGURES).write_bytes(orjson.dumps(figures, option=orjson.OPT_INDENT_2))
    return True
