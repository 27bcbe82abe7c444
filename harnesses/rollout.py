"""The rollout runner: create a session, run the harness, verify, reward, seal; many at a time.

Every session has its own key, and directories that are its own while it runs. Their paths stand in
prompts (Codex includes its working directory and its home), so sessions run in numbered places, one
after another under the same path: what is the same in their prompts is computed once, by an engine
that caches prefixes and by a trainer that shares them.

An agent that fails or runs out of time is a result like any other; only a failure of the machinery
(proxy, sandbox, verifier) is tried again, in a new session, while the failed one is sealed as
``infrastructure`` so that it is not trained on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bridle.harnesses.adapters.base import DEFAULT_MODEL, Access, Adapter
from bridle.harnesses.client import (
    Client,
    ControlError,
    ProxyUnreachable,
    Session,
    SessionRequest,
)
from bridle.harnesses.episode import Episode, EpisodeResult, Outcome
from bridle.harnesses.guards import GuardAction, findings, guarded
from bridle.harnesses.sampling import POLICY, session_settings
from bridle.harnesses.sandboxes.base import (
    LaunchRefused,
    SandboxLost,
    SandboxProvider,
    SandboxRequest,
)
from bridle.harnesses.tasks.task import Task
from bridle.harnesses.verifiers import REWARD, Scores, Verifier, VerifierError
from bridle.store.records import new_id

log = logging.getLogger(__name__)

_CANCEL_S: Final = 5.0
"""The longest that the end of a failed or cancelled session waits for an answer of the proxy."""


@dataclass(frozen=True, slots=True)
class Job:
    """One session to run."""

    task: Task
    group_id: str | None = None


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """The result of a job; of a job that was retried, its last session's."""

    session_id: str | None
    """``None`` when not even a session could be had."""
    task_id: str
    group_id: str | None
    outcome: Outcome
    scores: Scores
    seconds: float
    """Wall time of the harness."""
    exit_code: int | None
    answer: str = ""
    error: str = ""
    """Why the outcome is ``infrastructure``."""
    attempts: int = 1
    final: bool = True
    """Whether another attempt would end the same way."""


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """How jobs are run."""

    directory: Path
    """Holds the places, and the kept folders of sessions under their ids."""
    parallel: int = 4
    timeout_s: float = 600.0
    """For one harness run."""
    model: str = DEFAULT_MODEL
    run_id: str | None = None
    continuation: str | None = None
    session_settings: Mapping[str, Any] = field(default_factory=lambda: session_settings(POLICY))
    """Handed to the proxy with each session: sampling pins, budgets. The default pins sampling to
    the policy's own distribution."""
    labels: Mapping[str, Any] = field(default_factory=dict)
    retries: int = 1
    """How often a job is tried again after an infrastructure failure."""
    retry_wait_s: float = 1.0
    guards: GuardAction = "warn"
    """What a finding of a guard (``guards.py``) costs a session."""
    keep_directories: bool = False
    """Directories of sessions that did not complete are kept in any case."""


def grouped(tasks: Iterable[Task], size: int) -> Iterator[Job]:
    """``size`` jobs per task, under a group id of their own."""
    for task in tasks:
        group_id = new_id("grp")
        for _ in range(size):
            yield Job(task, group_id)


def require_launchable(
    adapter: Adapter, sandboxes: SandboxProvider, task: Task, settings: RolloutSettings
) -> None:
    """Raises what the adapter knows before there is a session, such as ``NotLaunchable``."""
    nobody = Session(id="", key="", base_urls=dict.fromkeys(("openai", "anthropic", "google"), ""))
    request = SandboxRequest(settings.directory.absolute() / "place", container=task.container)
    adapter.plan(task, Access(nobody, settings.model), sandboxes.expected_place(request))


class Rollout:
    """Runs jobs of one harness against one proxy."""

    def __init__(
        self,
        client: Client,
        adapter: Adapter,
        sandboxes: SandboxProvider,
        verifier: Verifier,
        settings: RolloutSettings,
        slots: asyncio.Semaphore | None = None,
    ) -> None:
        """``slots``: shared with other rollouts; ``None``: own ones, ``settings.parallel``."""
        self._client = client
        self._adapter = adapter
        self._sandboxes = sandboxes
        self._verifier = verifier
        self._settings = settings
        self._slots = slots or asyncio.Semaphore(settings.parallel)

    async def one(self, job: Job, began: Callable[[], None] = lambda: None) -> RolloutResult:
        """The result of one job, once a slot is free for it.

        ``began`` is called when it has one. Raises as :meth:`run` does; cancelled, it ends what
        runs.
        """
        async with self._slots:
            began()
            require_launchable(self._adapter, self._sandboxes, job.task, self._settings)
            return await self._with_retries(job)

    async def run(self, jobs: Iterable[Job]) -> AsyncGenerator[RolloutResult, None]:
        """Results as they come, in no order. Leaving early ends what still runs.

        Raises what no job can do anything about: ``NotLaunchable`` and :class:`ControlError`.
        """
        waiting = iter(jobs)
        running: set[asyncio.Task[RolloutResult]] = set()
        try:
            while True:
                while len(running) < self._settings.parallel:
                    job = next(waiting, None)
                    if job is None:
                        break
                    require_launchable(self._adapter, self._sandboxes, job.task, self._settings)
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
        """All results, in the order they came; ``progress`` is called with each."""
        results = []
        stream = self.run(jobs)
        async with contextlib.aclosing(stream):
            async for result in stream:
                results.append(result)
                if progress is not None:
                    progress(result)
        return results

    async def _with_retries(self, job: Job) -> RolloutResult:
        for attempt in range(1, self._settings.retries + 2):
            result = await self._attempt(job, attempt)
            if result.final or attempt > self._settings.retries:
                return result
            log.warning("task %s: %s; trying again", job.task.id, result.error)
            await asyncio.sleep(self._settings.retry_wait_s)
        raise AssertionError("the loop returns")

    async def _attempt(self, job: Job, attempt: int) -> RolloutResult:
        started = time.monotonic()
        session: Session | None = None
        try:
            session = await self._new_session(job)
            return await self._in_session(job, session, attempt)
        except (ProxyUnreachable, SandboxLost, LaunchRefused, VerifierError) as error:
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
                error=str(error),
                attempts=attempt,
                final=not getattr(error, "retryable", False),
            )
        except BaseException:
            # Cancelled, or a fault of ours: what was recorded must not pass for a finished run.
            if session is not None:
                await _to_its_end(self._seal_quietly(session, Outcome.CANCELLED))
            raise

    async def _new_session(self, job: Job) -> Session:
        """Cancelled while the proxy makes the session, it waits for what is made and seals it."""
        making = asyncio.ensure_future(self._client.create_session(self._session_request(job)))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            await _to_its_end(self._take_back(making))
            raise

    async def _take_back(self, making: asyncio.Future[Session]) -> None:
        """Seals the session of ``making``, if there is one; the cancellation is what is raised."""
        await asyncio.wait([making], timeout=_CANCEL_S)
        if making.cancel() or making.cancelled():
            log.warning("a session may stay unsealed: it was not there in %g s", _CANCEL_S)
        elif error := making.exception():
            log.warning("a session may stay unsealed: %s", error)
        else:
            await self._seal_quietly(making.result(), Outcome.CANCELLED)

    async def _in_session(self, job: Job, session: Session, attempt: int) -> RolloutResult:
        with self._directory_for(session) as directory:
            request = SandboxRequest(directory, session.base_urls, job.task.container)
            async with self._sandboxes.open(request) as sandbox:
                episode = await Episode(
                    self._adapter,
                    self._sandboxes,
                    self._verifier,
                    sandbox,
                    request,
                    session,
                    self._settings.model,
                    self._settings.timeout_s,
                ).run(job.task)
            outcome = await self._judged(session, episode)
            found = findings(await self._client.actions(session.id))
            if found and self._settings.guards == "quarantine":
                outcome = Outcome.QUARANTINED
            scores = guarded(episode.scores, found, self._settings.guards, REWARD)
            for name, value in scores.items():
                await self._client.reward(
                    session.id, name, value, verifier_key=session.verifier_key
                )
            await self._client.seal(session.id, outcome)
            if outcome is Outcome.COMPLETED and not self._settings.keep_directories:
                shutil.rmtree(directory, ignore_errors=True)
        return RolloutResult(
            session_id=session.id,
            task_id=job.task.id,
            group_id=job.group_id,
            outcome=outcome,
            scores=scores,
            seconds=episode.seconds,
            exit_code=episode.exit_code,
            answer=episode.answer,
            attempts=attempt,
        )

    @contextlib.contextmanager
    def _directory_for(self, session: Session) -> Iterator[Path]:
        """The first free place; what is in it afterwards is kept under the session's id.

        A place is taken while its directory exists, also for other processes. The directory of
        a killed process stays.
        """
        directory = self._settings.directory.absolute()
        directory.mkdir(parents=True, exist_ok=True)
        for number in itertools.count():
            root = directory / f"place-{number}"
            with contextlib.suppress(FileExistsError):
                root.mkdir()
                break
        try:
            yield root
        finally:
            with contextlib.suppress(FileNotFoundError):
                root.rename(directory / session.id)

    async def _judged(self, session: Session, episode: EpisodeResult) -> Outcome:
        """The outcome of a session, with what the record adds: an agent that failed and got no
        reply to any of its calls was failed by the engine."""
        if episode.outcome is Outcome.AGENT_ERROR:
            calls = (await self._client.session(session.id)).get("calls") or {}
            if calls.get("failed") and not calls.get("complete"):
                raise ProxyUnreachable("the engine answered none of the agent's calls")
        return episode.outcome

    async def _seal_quietly(self, session: Session, outcome: Outcome) -> None:
        """Seals a session whose run has failed already; the first failure is the one to report."""
        try:
            await asyncio.wait_for(self._client.seal(session.id, outcome), _CANCEL_S)
        except (ProxyUnreachable, ControlError, TimeoutError) as error:
            log.warning("session %s stays unsealed: %s", session.id, error)

    def _session_request(self, job: Job) -> SessionRequest:
        return SessionRequest(
            run_id=self._settings.run_id,
            task=job.task,
            group_id=job.group_id,
            harness=self._adapter.name,
            continuation=self._settings.continuation,
            settings=self._settings.session_settings or None,
            labels=self._settings.labels or None,
        )


async def _to_its_end(ending: Coroutine[Any, Any, None]) -> None:
    """Waits for ``ending`` however often it is cancelled: the client is closed right after.

    Only where an error is being raised already: a cancellation that comes meanwhile is lost.
    """
    task = asyncio.ensure_future(ending)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([task])
    task.result()
