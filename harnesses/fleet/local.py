"""A fleet for sessions on this machine, each in a sandbox of its own.

The paths of sessions appear in prompts (Codex includes its working directory and its home). So
sessions run in numbered places, one after another under the same path. An engine that caches
prefixes and a trainer that shares them then compute the equal parts of their prompts once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

from bridle.harnesses.adapters.base import Access, Adapter
from bridle.harnesses.client import Session
from bridle.harnesses.episode import Episode, EpisodeResult, Outcome
from bridle.harnesses.fleet.base import SessionPlan
from bridle.harnesses.sandboxes.base import SandboxProvider, SandboxRequest
from bridle.harnesses.sandboxes.leftovers import remove_folder
from bridle.harnesses.stages import STAGES, StageClock, StageSlots
from bridle.harnesses.tasks.task import Task
from bridle.harnesses.verifiers import Verifier

_PLACE: Final = "place-"


class LocalFleet:
    """A fleet that runs plans in sandboxes of one kind, and verifies them."""

    overlap = len(STAGES)

    def __init__(self, sandboxes: SandboxProvider, verifier: Verifier) -> None:
        self.sandboxes, self.verifier = sandboxes, verifier
        self._slots: dict[int, StageSlots] = {}

    @property
    def host(self) -> str:
        return "127.0.0.1"

    def require_launchable(self, adapter: Adapter, task: Task, directory: Path, model: str) -> None:
        nobody = Session(id="", key="", base_urls=defaultdict(str))
        request = SandboxRequest(directory.absolute() / "place", container=task.container)
        adapter.plan(task, Access(nobody, model), self.sandboxes.expected_place(request))

    async def run(self, plan: SessionPlan) -> EpisodeResult:
        clock = StageClock(self._slots.setdefault(plan.parallel, StageSlots(plan.parallel)))
        with _place(plan.directory, plan.session.id) as directory:
            # The names of places and of kept folders begin so: no session sees another's.
            kept = f"{plan.session.id.partition('_')[0]}_"
            others = (plan.directory / _PLACE, plan.directory / kept)
            request = SandboxRequest(
                directory,
                plan.session.base_urls,
                plan.task.container,
                (*plan.hidden, *others),
                plan.bounds,
                plan.seen_as,
            )
            async with AsyncExitStack() as opened:
                async with clock.stage("prepare"):
                    sandbox = await opened.enter_async_context(self.sandboxes.open(request))
                result = await Episode(
                    plan.adapter,
                    self.sandboxes,
                    self.verifier,
                    sandbox,
                    request,
                    plan.session,
                    plan.model,
                    plan.timeout_s,
                    clock,
                    plan.artefacts,
                ).run(plan.task)
                async with clock.stage("clean"):
                    await opened.aclose()
        if result.outcome is Outcome.COMPLETED and not plan.keep_directory:
            await asyncio.to_thread(remove_folder, plan.directory / plan.session.id)
        return replace(result, stages=clock.seconds)

    async def close(self) -> None:
        await self.sandboxes.close()


@contextlib.contextmanager
def _place(directory: Path, session_id: str) -> Iterator[Path]:
    """Take the first free place, and yield its folder.

    Afterwards, the folder has the session's id as its name, and the place is free in one step:
    whoever takes it next has a folder of its own.

    A place is taken while its directory exists, also for other processes. The directory of a killed
    process stays.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for number in itertools.count():
        root = directory / f"{_PLACE}{number}"
        with contextlib.suppress(FileExistsError):
            root.mkdir()
            break
    try:
        yield root
    finally:
        with contextlib.suppress(FileNotFoundError):  # The session removed its own.
            root.rename(directory / session_id)
