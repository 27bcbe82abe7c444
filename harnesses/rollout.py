"""The rollout runner: it creates sessions, has a fleet run them, and rewards and seals them.

Many sessions run at a time. An agent that fails or runs out of time is a result like any other.
Only a failure of the machinery (proxy, machine, sandbox, verifier) is retried, in a new session
with the label ``retry_of``; the failed session is sealed as ``infrastructure``, so that it is not
trained on. Only this module rewards and seals a session, and only once, so that a machine that was
taken for dead adds nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
)
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from msgspec import convert
from msgspec.structs import replace

from bridle.harnesses.adapters.base import DEFAULT_MODEL, Adapter
from bridle.harnesses.client import (
    Client,
    ControlError,
    Origin,
    ProxyUnreachable,
    Session,
    SessionRequest,
)
from bridle.harnesses.episode import EpisodeResult, Outcome
from bridle.harnesses.fleet.base import Fleet, SessionPlan
from bridle.harnesses.guards import Finding, GuardAction, findings
from bridle.harnesses.sampling import POLICY, session_settings
from bridle.harnesses.sandboxes.base import LaunchRefused, SandboxLost
from bridle.harnesses.sandboxes.bounds import Bounds
from bridle.harnesses.scorers import FinishedSession, Scorer, Turn
from bridle.harnesses.scorers.judging import Judging
from bridle.harnesses.scorers.outcome import Places, scored
from bridle.harnesses.tasks.task import Task
from bridle.harnesses.verifiers import Scores, VerifierError
from bridle.harnesses.verifiers.delivery import scores_in
from bridle.store.records import new_id
from bridle.store.reward import FindingMode, Reward, RewardKind, RewardSource

log = logging.getLogger(__name__)

_CANCEL_S: Final = 5.0
"""Maximum seconds that the end of a failed or cancelled session waits for the proxy's reply."""


_OF_A_SESSION: Final = (ProxyUnreachable, SandboxLost, LaunchRefused, VerifierError)
_OF_ITS_FILES: Final = (OSError, UnicodeError, RecursionError, MemoryError)
"""The errors of a session's files, names and outputs that no part handled. They end only that
session."""


@dataclass(frozen=True, slots=True)
class Job:
    """One session to run."""

    task: Task
    group_id: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Session settings of this job, which override those of the rollout."""
    origin: Origin | None = None
    """The recorded session that the job's sessions re-enter."""


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """The result of a job. For a job that was retried, it is that of its last session."""

    session_id: str | None
    """The session's id, or ``None`` if no session could be created."""
    task_id: str
    group_id: str | None
    outcome: Outcome
    scores: Scores
    """The verifier's scores, unchanged. The reader of ``rewards`` decides which of them count."""
    seconds: float
    """Seconds of wall time that the harness ran."""
    exit_code: int | None
    answer: str = ""
    error: str = ""
    """The reason for the outcome ``infrastructure``."""
    attempts: int = 1
    stages: Mapping[str, float] = field(default_factory=dict)
    """Seconds by stage (:mod:`bridle.harnesses.stages`)."""
    final: bool = True
    """True if another attempt would end the same way."""
    rewards: tuple[Reward, ...] = ()
    """The recorded rewards of the session: its scores, and the findings of guards."""


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """The settings with which jobs are run."""

    directory: Path
    """The folder on each machine of the fleet that holds the kept folders of sessions under their
    ids."""
    parallel: int = 4
    """Maximum sessions that run at a time. On this machine, as many are prepared and verified
    meanwhile."""
    timeout_s: float = 600.0
    """The time limit of one harness run."""
    model: str = DEFAULT_MODEL
    run_id: str | None = None
    continuation: str | None = None
    session_settings: Mapping[str, Any] = field(default_factory=lambda: session_settings(POLICY))
    """Settings that the proxy receives with each session, such as sampling pins and budgets. The
    default pins sampling to the policy's own distribution."""
    labels: Mapping[str, Any] = field(default_factory=dict)
    retries: int = 1
    """Number of times that a job is retried after an infrastructure failure."""
    retry_wait_s: float = 1.0
    guards: GuardAction = "warn"
    """The cost of a guard's finding (``guards.py``) for a session."""
    hidden: tuple[Path, ...] = ()
    """Files and folders that no session may see, besides those that the proxy names."""
    bounds: Bounds = field(default_factory=Bounds)
    """The bounds of each session's processes."""
    keep_directories: bool = False
    """True if the directories of completed sessions are kept. Those of other sessions are kept in
    any case."""
    scorers: tuple[Scorer, ...] = ()
    """The scorers that read each session's record after the verifier."""
    artefacts: tuple[str, ...] = ()
    """Files of the workspace that scorers get, if the agent left them."""
    judgements: int | None = None
    """Maximum number of judgements that scorers ask of models; ``None`` stands for any number."""


def grouped(tasks: Iterable[Task], size: int) -> Iterator[Job]:
    """Yield ``size`` jobs per task, with one group id for each task."""
    for task in tasks:
        group_id = new_id("grp")
        for _ in range(size):
            yield Job(task, group_id)


class Rollout:
    """A runner of the jobs of one harness against one proxy."""

    def __init__(
        self,
        client: Client,
        adapter: Adapter,
        fleet: Fleet,
        settings: RolloutSettings,
        judgements: Counter[str] | None = None,
    ) -> None:
        """Make a runner. ``judgements`` counts those of :class:`Judging`."""
        self._client = client
        self._adapter = adapter
        self._fleet = fleet
        self._settings = settings
        self._private: tuple[Path, ...] | None = None
        self._judging = Judging(
            client, settings.judgements, Counter() if judgements is None else judgements
        )
        self._slots = asyncio.Semaphore(fleet.overlap * settings.parallel)

    async def one(self, job: Job, began: Callable[[], None] = lambda: None) -> RolloutResult:
        """Return the result of one job, once a slot is free for it.

        ``began`` is called when the job has a slot. Raise the same errors as :meth:`run`. When
        cancelled, end the running session.
        """
        async with self._slots:
            began()
            self._require_launchable(job)
            return await self._with_retries(job)

    async def run(self, jobs: Iterable[Job]) -> AsyncGenerator[RolloutResult, None]:
        """Yield results in the order in which they arrive.

        Leaving early ends the sessions that still run.

        Raise the errors that affect every job: ``NotLaunchable`` and :class:`ControlError`.
        """
        waiting = iter(jobs)
        running: set[asyncio.Task[RolloutResult]] = set()
        try:
            while True:
                while len(running) < self._fleet.overlap * self._settings.parallel:
                    job = next(waiting, None)
                    if job is None:
                        break
                    self._require_launchable(job)
                    running.add(asyncio.create_task(self._with_retries(job)))
                if not running:
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for finished in done:
                    yield finished.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def collect(
        self,
        jobs: Iterable[Job],
        progress: Callable[[RolloutResult], None] | None = None,
    ) -> list[RolloutResult]:
        """Return all results in the order in which they arrived.

        ``progress`` is called with each.
        """
        results = []
        stream = self.run(jobs)
        async with contextlib.aclosing(stream):
            async for result in stream:
                results.append(result)
                if progress is not None:
                    progress(result)
        return results

    def _require_launchable(self, job: Job) -> None:
        directory, model = self._settings.directory, self._settings.model
        self._fleet.require_launchable(self._adapter, job.task, directory, model)

    async def _with_retries(self, job: Job) -> RolloutResult:
        failed: str | None = None
        for attempt in range(1, self._settings.retries + 2):
            result = await self._attempt(job, attempt, failed)
            if result.final or attempt > self._settings.retries:
                return result
            log.warning("task %s: %s; trying again", job.task.id, result.error)
            failed = result.session_id or failed
            await asyncio.sleep(self._settings.retry_wait_s)
        raise AssertionError("the loop returns")

    async def _attempt(self, job: Job, attempt: int, failed: str | None) -> RolloutResult:
        """Try a job once. ``failed`` is the session id of the previous attempt."""
        started = time.monotonic()
        session: Session | None = None
        try:
            session = await self._new_session(self._session_request(job, failed))
            return await self._in_session(job, session, attempt)
        except (*_OF_A_SESSION, *_OF_ITS_FILES) as error:
            if not isinstance(error, _OF_A_SESSION):
                log.warning("session_failed: task %s", job.task.id, exc_info=True)
            if session is not None:
                await self._seal_quietly(session, Outcome.INFRASTRUCTURE)
            return RolloutResult(
                session_id=session.id if session else None,
                task_id=job.task.id,
                group_id=job.group_id,
                outcome=Outcome.INFRASTRUCTURE,
                scores={},
                seconds=time.monotonic() - started,
                exit_code=None,
                error=str(error) or type(error).__name__,
                attempts=attempt,
                final=not getattr(error, "retryable", False),
            )
        except BaseException:
            # Cancelled, or a fault of ours: what was recorded must not pass for a finished run.
            if session is not None:
                await _to_its_end(self._seal_quietly(session, Outcome.CANCELLED))
            raise

    async def _new_session(self, request: SessionRequest) -> Session:
        """Create a session.

        If cancelled while the proxy creates it, wait for the session and seal it.
        """
        making = asyncio.ensure_future(self._client.create_session(request))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            await _to_its_end(self._take_back(making))
            raise

    async def _take_back(self, making: asyncio.Future[Session]) -> None:
        """Seal the session of ``making``, if it is created.

        Failures are only logged, because the cancellation is the error to raise.
        """
        await asyncio.wait([making], timeout=_CANCEL_S)
        if making.cancel() or making.cancelled():
            log.warning("a session may stay unsealed: it was not there in %g s", _CANCEL_S)
        elif error := making.exception():
            log.warning("a session may stay unsealed: %s", error)
        else:
            await self._seal_quietly(making.result(), Outcome.CANCELLED)

    async def _in_session(self, job: Job, session: Session, attempt: int) -> RolloutResult:
        episode = await self._fleet.run(
            SessionPlan(
                task=job.task,
                adapter=self._adapter,
                session=replace(session, verifier_key=""),
                model=self._settings.model,
                timeout_s=self._settings.timeout_s,
                directory=self._settings.directory.absolute(),
                parallel=self._settings.parallel if self._fleet.overlap > 1 else 0,
                hidden=await self._hidden(),
                bounds=self._settings.bounds,
                keep_directory=self._settings.keep_directories,
                artefacts=self._settings.artefacts if self._settings.scorers else (),
                seen_as=await self._recorded_place(job.origin),
            )
        )
        outcome = await self._judged(session, episode)
        found = findings(await self._client.actions(session.id))
        if found and self._settings.guards == "quarantine":
            outcome = Outcome.QUARANTINED
        rewards = (
            *await self._rewards(job, session, episode, outcome),
            *(_reported(session, one, FindingMode(self._settings.guards)) for one in found),
        )
        for one in rewards:
            await self._client.give(one, verifier_key=session.verifier_key)
        await self._client.seal(session.id, outcome, seconds=episode.stages, start=episode.start)
        return RolloutResult(
            session_id=session.id,
            task_id=job.task.id,
            group_id=job.group_id,
            outcome=outcome,
            scores=episode.scores,
            rewards=rewards,
            seconds=episode.seconds,
            exit_code=episode.exit_code,
            answer=episode.answer,
            error=episode.error,
            attempts=attempt,
            stages=episode.stages,
        )

    async def _rewards(
        self, job: Job, session: Session, episode: EpisodeResult, outcome: Outcome
    ) -> list[Reward]:
        """Return the rewards of the verifier and of the scorers."""
        whole = scores_in(episode.scores)
        if not (episode.placed or self._settings.scorers):
            return [one.reward(session.id) for one in whole]
        turns = convert(await self._client.calls(session.id), tuple[Turn, ...])
        given = (*whole, *episode.placed)
        own = Places(turns).rewards(session.id, given, RewardSource.VERIFIER)
        finished = FinishedSession(
            session.id,
            job.task,
            turns,
            outcome,
            episode.answer,
            episode.scores,
            episode.seconds,
            episode.artefacts,
            self._settings.bounds,
            partial(self._judging.ask, session.id),
        )
        return [*own, *await scored(finished, self._settings.scorers)]

    async def _recorded_place(self, origin: Origin | None) -> Path | None:
        """Return the folder in which the recorded session of ``origin`` saw its workspace."""
        if origin is None:
            return None
        folder = (await self._client.session(origin.session)).get("folder")
        return None if folder is None else Path(folder).parent

    async def _hidden(self) -> tuple[Path, ...]:
        """Return the files that no session may see. The proxy is asked only once."""
        if self._private is None:
            self._private = (*await self._client.private_files(), *self._settings.hidden)
        return self._private

    async def _judged(self, session: Session, episode: EpisodeResult) -> Outcome:
        """Return the session's outcome.

        Raise :class:`ProxyUnreachable` if the record shows that the engine or the proxy made its
        agent fail.
        """
        if episode.outcome is Outcome.AGENT_ERROR:
            fault = (await self._client.session(session.id)).get("fault")
            if fault is not None:
                raise ProxyUnreachable(f"the engine or the proxy failed the agent: {fault}")
        return episode.outcome

    async def _seal_quietly(self, session: Session, outcome: Outcome) -> None:
        """Seal a session whose run has failed already.

        Failures are only logged, because the first failure is the one to report.
        """
        try:
            await asyncio.wait_for(self._client.seal(session.id, outcome), _CANCEL_S)
        except (ProxyUnreachable, ControlError, TimeoutError) as error:
            log.warning("session %s stays unsealed: %s", session.id, error)

    def _session_request(self, job: Job, failed: str | None) -> SessionRequest:
        labels = {**self._settings.labels, **({"retry_of": failed} if failed else {})}
        return SessionRequest(
            run_id=self._settings.run_id,
            task=job.task,
            group_id=job.group_id,
            harness=self._adapter.name,
            continuation=self._settings.continuation,
            settings={**self._settings.session_settings, **job.settings} or None,
            labels=labels or None,
            origin=job.origin,
        )


def _reported(session: Session, found: Finding, mode: FindingMode) -> Reward:
    return Reward(
        session.id,
        found.name,
        float(len(found.turns)),
        time.time(),
        source=RewardSource.VERIFIER,
        kind=RewardKind.FINDING,
        mode=mode,
        detail={"turns": list(found.turns), "example": found.example},
    )


async def _to_its_end(ending: Coroutine[Any, Any, None]) -> None:
    """Wait for ``ending``, however often the wait is cancelled.

    The client is closed right after, so ``ending`` must be over by then. Call it only while an
    error is being raised already, because a cancellation that arrives meanwhile is lost.
    """
    task = asyncio.ensure_future(ending)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([task])
    task.result()
