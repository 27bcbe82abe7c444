"""The loader of tasks in Harbor folders.

It loads one folder, a dataset of them, or a ``dataset.toml`` that names them.
"""

from __future__ import annotations

import logging
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bridle.harnesses.tasks.harbor.config import (
    HarborConfig,
    container_of,
    payload_of,
    read_config,
    read_part,
    thresholds,
)
from bridle.harnesses.tasks.task import Identity, Step, Task, TaskError, remember

log = logging.getLogger(__name__)

_CANARY: Final = re.compile(r"^(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)


def harbor_tasks(reference: str) -> Iterator[Task]:
    """Yield the tasks at a path. Raise :class:`TaskError`.

    A task of a dataset that cannot be run is left out, which is logged with the reason. If none can
    be run, or if the path is one task, the error is raised.
    """
    path = Path(reference).expanduser()
    if path.name == "dataset.toml":
        suite, folders = path.parent.resolve().name, list(_named(path))
    elif (path / "task.toml").is_file():
        suite, folders = path.resolve().parent.name, [path]
    else:
        inside = path / "tasks" if (path / "tasks").is_dir() else path
        suite = path.resolve().name
        folders = sorted(found.parent for found in inside.glob("*/task.toml"))
        if not folders:
            raise TaskError(f"{path} has no task.toml, and no folder in it has one")
    known: set[Identity] = set()
    left_out: TaskError | None = None
    for folder in folders:
        try:
            task = harbor_task(folder.resolve(), suite)
        except TaskError as error:
            log.warning("task_left_out: %s", error)
            left_out = left_out or error
            continue
        remember(known, task)
        yield task
    if left_out is not None and not known:
        raise left_out


def harbor_task(folder: Path, suite: str) -> Task:
    """Return the task in ``folder``. Raise :class:`TaskError`."""
    _refuse_foreign(folder)
    config = read_config(folder)
    name = config.task.name if config.task else folder.name
    steps = tuple(_steps(folder, config))
    return Task(
        id=name,
        prompt=steps[0].prompt if steps else _only_instruction(folder),
        suite=suite,
        payload=payload_of(folder),
        container=container_of(folder / "environment", config.environment, config.agent),
        timeout_s=config.agent.timeout_sec,
        steps=steps,
        combine=config.multi_step_reward_strategy or "mean",
    )


def _refuse_foreign(folder: Path) -> None:
    """Raise :class:`TaskError` if a link leads out of the task, or if a file is no regular one.

    Its files are copied to sessions, verifiers and images: the agent would get what a link leads
    to, and a pipe would block its reader.
    """
    for parent, folders, files in os.walk(folder):
        for path in (Path(parent, name) for name in (*folders, *files)):
            if path.is_symlink():
                if not path.resolve().is_relative_to(folder):
                    raise TaskError(f"{path} is a link that leads out of the task")
            elif not (path.is_file() or path.is_dir()):
                raise TaskError(f"{path} is no regular file")


def _steps(folder: Path, config: HarborConfig) -> Iterator[Step]:
    for step in config.steps:
        inside = folder / "steps" / step.name
        if not inside.resolve().is_relative_to(folder):
            raise TaskError(f"{folder}: the step {step.name!r} lies outside of the task")
        setup = inside / "workdir"
        yield Step(
            name=step.name,
            prompt=_instruction(folder, inside),
            timeout_s=step.agent.timeout_sec,
            user=None if step.agent.user is None else str(step.agent.user),
            setup=str(setup) if setup.is_dir() else None,
            min_rewards=thresholds(step.min_reward),
        )


def _only_instruction(folder: Path) -> str:
    if (folder / "steps").is_dir() and not (folder / "instruction.md").exists():
        raise TaskError(f"{folder} has steps that its task.toml does not name: add [[steps]]")
    return _instruction(folder, folder)


def _instruction(task: Path, folder: Path) -> str:
    """Return the ``instruction.md`` of a task, or of a step of it, that lies in ``folder``.

    The marks that keep benchmarks out of training data are left out.
    """
    file = folder / "instruction.md"
    try:
        lines = read_part(task, file).decode().split("\n")
    except UnicodeDecodeError as error:
        raise TaskError(f"{file}: {error}") from error
    while lines and _CANARY.match(lines[0].strip()):
        del lines[0]
    while lines and not lines[0].strip():
        del lines[0]
    return "\n".join(lines)


def _named(manifest: Path) -> Iterator[Path]:
    """Yield the folders of the tasks that a ``dataset.toml`` lists.

    They are beside it or in its ``tasks``.
    """
    try:
        listed = tomllib.loads(manifest.read_text(encoding="utf-8")).get("tasks", [])
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TaskError(f"{manifest}: {error}") from error
    for entry in listed:
        name = str(entry.get("path") or entry.get("name", "")).rpartition("/")[2]
        candidates = [manifest.parent / str(entry.get("path") or name)]
        candidates.append(manifest.parent / "tasks" / name)
        found = next((path for path in candidates if (path / "task.toml").is_file()), None)
        if found is None:
            raise TaskError(
                f"{manifest} names {entry.get('name')!r}, which is not beside it: "
                "`harbor download` brings a dataset's tasks"
            )
        yield found
