"""One session inside an opened sandbox: the harness runs and the verifier scores, step by step."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from bridle.harnesses.adapters.base import Access, Adapter
from bridle.harnesses.client import Session
from bridle.harnesses.sandboxes.base import (
    Launch,
    ProcessResult,
    Sandbox,
    SandboxProvider,
    SandboxRequest,
)
from bridle.harnesses.sandboxes.spec import ContainerSpec
from bridle.harnesses.stages import StageClock
from bridle.harnesses.started import how_started
from bridle.harnesses.tasks.task import Step, Task
from bridle.harnesses.verifiers import Delivery, NoVerdict, Score, Scores, Verifier
from bridle.harnesses.verifiers.delivery import scores_in, whole_scores
from bridle.store.records import StartFacts


class Outcome(StrEnum):
    """The end of a session."""

    COMPLETED = "completed"
    """The harness exited with 0."""
    AGENT_ERROR = "agent_error"
    """The harness exited with another code. Its answer is empty."""
    TIMEOUT = "timeout"
    INFRASTRUCTURE = "infrastructure"
    """The proxy, the sandbox or the verifier failed, so nothing is known about the agent."""
    QUARANTINED = "quarantined"
    """A guard found something that the run keeps out of training."""
    CANCELLED = "cancelled"
    """The rollout was stopped while the session ran. Sessions are sealed with it, but it is never a
    result."""


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """The result of a session's task."""

    outcome: Outcome
    """The outcome of the first step that did not complete, or else ``completed``."""
    scores: Scores
    """The verifier's scores of the session as a whole."""
    seconds: float
    """Seconds that the harness ran, in all steps together."""
    exit_code: int | None
    answer: str
    stages: Mapping[str, float] = field(default_factory=dict)
    """Seconds by stage (:mod:`bridle.harnesses.stages`)."""
    start: StartFacts | None = None
    """The start of the harness for the first step."""
    error: str = ""
    """The bound for which the agent was ended; empty if there was none."""
    placed: tuple[Score, ...] = ()
    """The verifier's other rewards: those of parts of the session, successes and findings."""
    artefacts: Mapping[str, bytes] = field(default_factory=dict)
    """The contents of the files of the workspace that scorers get, by name."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One session's harness, sandbox and verifier."""

    adapter: Adapter
    sandboxes: SandboxProvider
    verifier: Verifier
    sandbox: Sandbox
    request: SandboxRequest
    session: Session
    model: str
    timeout_s: float
    """The time limit for a task that states none."""
    clock: StageClock
    artefacts: tuple[str, ...] = ()
    """The files of the workspace that scorers get, if the agent left them."""
    _steps: list[Scores] = field(default_factory=list)

    async def run(self, task: Task) -> EpisodeResult:
        """Run the steps of ``task``, and score each.

        Raise the errors of the sandbox and the verifier.
        """
        seconds = 0.0
        outcome, answer = Outcome.COMPLETED, ""
        exit_code: int | None = 0
        start: StartFacts | None = None
        error = ""
        placed: list[Score] = []
        for step in task.steps or (Step("", task.prompt),):
            one = _one(task, step)
            async with self.clock.stage("prepare"):
                if step.setup is not None:
                    await self._set_up(step, Path(step.setup))
                launch = await self._harness(one, step)
                start = start or self._started(launch)
            async with self.clock.stage("run"):
                finished = await self.sandbox.exec(launch)
            seconds += finished.seconds
            ended, error = outcome_of(finished), error or _bound_of(finished)
            answer = ""
            if ended is Outcome.COMPLETED:
                answer = await self.adapter.answer(finished, self.sandbox)
            if outcome is Outcome.COMPLETED:
                outcome, exit_code = ended, finished.exit_code
            async with self.clock.stage("verify"):
                verdict = await self.verifier(self._delivery(one, answer, finished.exit_code))
            given = scores_in(verdict)
            scores = whole_scores(given)
            placed += [score for score in given if not score.is_whole]
            self._steps.append(scores)
            if not reaches(scores, step.min_rewards):
                break
        return EpisodeResult(
            outcome,
            combined(self._steps, task.combine),
            seconds,
            exit_code,
            answer,
            start=start,
            error=error,
            placed=tuple(placed),
            artefacts=await self._artefacts(),
        )

    async def _artefacts(self) -> dict[str, bytes]:
        found = {}
        for name in self.artefacts:
            with contextlib.suppress(FileNotFoundError):
                found[name] = await self.sandbox.read(self.sandbox.place.workspace / name)
        return found

    def _started(self, launch: Launch) -> StartFacts:
        folder, key = str(self.sandbox.place.workspace), self.session.key
        return how_started(launch.argv, folder, launch.environment, secrets=(key,))

    async def _set_up(self, step: Step, folder: Path) -> None:
        workspace = self.sandbox.place.workspace
        await self.sandbox.upload(folder, workspace)
        if not (folder / "setup.sh").exists():
            return
        launch = Launch(
            ("/bin/bash", str(workspace / "setup.sh")),
            self.sandbox.place.environment,
            self.timeout_s,
            role="setup",
            user=step.user,
        )
        finished = await self.sandbox.exec(launch)
        if finished.exit_code != 0:
            error = finished.stderr.tail.strip()[-300:]
            raise NoVerdict(
                f"setup.sh of the step {step.name} ended with {finished.exit_code}: {error}"
            )

    async def _harness(self, task: Task, step: Step) -> Launch:
        """Write the harness's files, and return the launch that starts it."""
        place = self.sandbox.place
        plan = self.adapter.plan(task, Access(self._reached_from_inside(), self.model), place)
        given = {place.workspace / name: text for name, text in task.files.items()}
        await self.sandbox.write({**plan.files, **given})
        timeout_s = step.timeout_s or task.timeout_s or self.timeout_s
        return Launch(plan.argv, plan.environment, timeout_s, user=step.user, shown=plan.shown)

    def _delivery(self, task: Task, answer: str, exit_code: int | None) -> Delivery:
        workspace = Path(self.sandbox.place.workspace)
        sandbox, bounds = self.sandbox, self.request.bounds
        return Delivery(task, answer, workspace, exit_code, sandbox, self._open_another, bounds)

    def _open_another(self, spec: ContainerSpec) -> AbstractAsyncContextManager[Sandbox]:
        directory = self.sandbox.directory / "verifier-sandbox"
        return _made(self.sandboxes, SandboxRequest(directory, self.request.urls, spec))

    def _reached_from_inside(self) -> Session:
        """Return the session with the URLs by which a process in the sandbox reaches it.

        The key that scores the session is left out.
        """

        def reached(values: Mapping[str, str]) -> dict[str, str]:
            return {
                name: self.sandbox.url(value) if "://" in value else value
                for name, value in values.items()
            }

        given = self.session
        return Session(given.id, given.key, reached(given.base_urls), reached(given.environment))


@asynccontextmanager
async def _made(sandboxes: SandboxProvider, request: SandboxRequest) -> AsyncIterator[Sandbox]:
    request.directory.mkdir(parents=True, exist_ok=True)
    async with sandboxes.open(request) as sandbox:
        yield sandbox


def _one(task: Task, step: Step) -> Task:
    """Return the task as the adapter and the verifier see it in one step."""
    if not step.name:
        return task
    payload = {**task.payload, "step": step.name}
    return replace(task, prompt=step.prompt, payload=payload, steps=())


def outcome_of(finished: ProcessResult) -> Outcome:
    if finished.timed_out:
        return Outcome.TIMEOUT
    return Outcome.COMPLETED if finished.exit_code == 0 else Outcome.AGENT_ERROR


def _bound_of(finished: ProcessResult) -> str:
    if finished.exceeded is None:
        return ""
    return f"the sandbox ended the agent: {finished.exceeded} (agent.bounds)"


def reaches(scores: Scores, minimum: Mapping[str, float]) -> bool:
    """Return whether every reward in ``minimum`` is there and at least its number."""
    return all(scores.get(name, float("-inf")) >= least for name, least in minimum.items())


def combined(steps: Sequence[Scores], how: str) -> Scores:
    """Return the session's rewards: the last step's, or the mean over the steps.

    In the mean, a missing reward counts as 0.
    """
    if how == "final" or len(steps) == 1:
        return steps[-1]
    names = dict.fromkeys(name for scores in steps for name in scores)
    return {name: sum(scores.get(name, 0.0) for scores in steps) / len(steps) for name in names}
