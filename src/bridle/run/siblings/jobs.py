"""Siblings of a session of a run: its task, agent, sandbox and verifier are made again."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import msgspec

from bridle.harnesses.rollout import Job, RolloutResult
from bridle.harnesses.tasks import Task
from bridle.reconstruct.rewards import Aggregation
from bridle.run.agents import first_tasks
from bridle.run.config import RolloutConfig, permitted
from bridle.run.rollouts import Rollouts, configured_fleet, configured_settings
from bridle.run.siblings.recording import Entry, NotReentrant, Recording, Sibling, Siblings


class JobSiblings(Siblings):
    """Runs the job of a recorded session again."""

    def __init__(
        self, proxy: str, key: str | None, recording: Recording, parallel: int | None = None
    ) -> None:
        """Make the job's parts anew.

        ``parallel`` replaces the run's number of sessions at a time. Raise :class:`NotReentrant`,
        and the errors of the parts.
        """
        config, folder = _config(recording)
        agent = config.agent
        with contextlib.chdir(folder):
            permitted(agent, config.tasks).grant()
            self._task = _task(config, recording.session)
            self._adapter, fleet = configured_fleet(agent, config.tasks, [self._task])
            self._settings = configured_settings(
                agent,
                config.scorers,
                Path("runs/replay").absolute(),
                parallel=parallel or agent.parallel,
                model=config.model,
                run_id=recording.session["run_id"],
            )
        self._name, self._config = (
            f"replay of {recording.id}",
            dict((recording.run or {})["config"]),
        )
        self._rollouts = Rollouts(proxy, fleet, key=key)
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> Self:
        rollouts = self._opened.enter_context(self._rollouts)
        run = rollouts.run(self._name, "replay", self._config)
        self._settings = replace(self._settings, run_id=self._opened.enter_context(run))
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

    def run(self, entry: Entry, count: int) -> Generator[Sibling]:
        job = Job(self._task, entry.group_id, {"replay": dict(entry.rules)}, entry.origin)
        results = self._rollouts.stream(self._adapter, [job] * count, self._settings)
        with contextlib.closing(results):
            yield from map(_sibling, results)


def _config(recording: Recording) -> tuple[RolloutConfig, Path]:
    """Return the settings that the session's run states, and the folder that it began in."""
    stated = {} if recording.run is None else recording.run["config"]
    if not {"tasks", "agent", "folder"} <= stated.keys():
        raise NotReentrant(
            f"the run of session {recording.id} does not name its tasks and agent, so its sandbox "
            "cannot be made again: record it with `bridle rollout` or `bridle train`"
        )
    folder = Path(stated["folder"])
    if not folder.is_dir():
        raise NotReentrant(
            f"the run of session {recording.id} began in {folder}, which is not there; make it "
            "again, or link it"
        )
    names = RolloutConfig.__dataclass_fields__
    return msgspec.convert({k: v for k, v in stated.items() if k in names}, RolloutConfig), folder


def _task(config: RolloutConfig, session: Mapping[str, Any]) -> Task:
    wanted = session["task_suite"], session["task_split"], session["task_id"]
    for task in first_tasks(config.tasks.source, None):
        if (task.suite, task.split, task.id) == wanted:
            return task
    raise NotReentrant(
        f"{config.tasks.source} has no {wanted[1]} task {wanted[2]!r} of suite {wanted[0]!r} any "
        "more: put it back, then its sessions can be replayed"
    )


def _sibling(result: RolloutResult) -> Sibling:
    return Sibling(
        result.session_id, Aggregation().value(result.rewards), result.exit_code, error=result.error
    )
