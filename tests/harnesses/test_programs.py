"""The programs of a process sandbox, and the files behind them that its walls show."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bridle.harnesses.sandboxes import NotLaunchable, ProcessProvider, SandboxRequest

MakeLaunch = Callable[..., Any]


@pytest.mark.parametrize("by_path", [False, True])
async def test_a_program_runs_whose_folder_is_reached_through_a_link(
    make_launch: MakeLaunch, tmp_path: Path, by_path: bool
) -> None:
    """The Python of a virtual environment is such a program: a link to another folder."""
    package, elsewhere = tmp_path / "package", tmp_path / "elsewhere" / "tool"
    for folder in (package, tmp_path / "real" / "bin", elsewhere.parent):
        folder.mkdir(parents=True)
    (package / "linked").symlink_to(tmp_path / "real")
    elsewhere.write_text("#!/bin/sh\necho found\n")
    elsewhere.chmod(0o755)
    (tmp_path / "real" / "bin" / "tool").symlink_to(elsewhere)
    folder = package / "linked" / "bin"
    environment = {"PATH": f"{folder}:{os.environ['PATH']}"} if by_path else None
    argv = ("sh", "-c", "tool") if by_path else (str(folder / "tool"),)

    launch = make_launch(
        *argv, environment=environment, shown=(str(package), str(elsewhere.parent))
    )
    finished = await launch.run(ProcessProvider())

    assert finished.stdout.tail == "found\n", finished


def linked_python(folder: Path) -> Path:
    """Return a Python that is a link to a link, each in a folder of its own.

    Its environment is a link in a folder that is reached by a link in ``folder / "shown"``, and the
    interpreter's own folder is outside the system's.
    """
    interpreter = folder / "interpreters" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text('#!/bin/sh\necho "$@"\n')
    interpreter.chmod(0o755)
    for name, target in (("first", interpreter), ("second", folder / "first" / "bin" / "python")):
        (folder / name / "bin").mkdir(parents=True)
        (folder / name / "bin" / "python").symlink_to(target)
    for name in ("rooms", "shown"):
        (folder / name).mkdir()
    (folder / "rooms" / "environment").symlink_to("../second")
    (folder / "shown" / "rooms").symlink_to("../rooms")
    return folder / "shown" / "rooms" / "environment" / "bin" / "python"


async def test_a_program_runs_that_is_a_chain_of_links(
    make_launch: MakeLaunch, tmp_path: Path
) -> None:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path / "shown")}
    launch = make_launch(str(linked_python(tmp_path)), "ran", environment=environment)
    finished = await launch.run(ProcessProvider())

    assert finished.stdout.tail == "ran\n", finished


@pytest.mark.parametrize("first_line", ["#!{python}", "#! /usr/bin/env -S python -u"])
async def test_a_script_runs_whose_interpreter_is_a_chain_of_links(
    make_launch: MakeLaunch, tmp_path: Path, first_line: str
) -> None:
    """The commands that pip installs begin with the Python of their environment."""
    python = linked_python(tmp_path)
    script = tmp_path / "scripts" / "tool"
    script.parent.mkdir()
    script.write_text(first_line.format(python=python) + "\n")
    script.chmod(0o755)
    environment = {"PATH": f"{python.parent}:/usr/bin:/bin"}

    launch = make_launch(str(script), environment=environment)
    finished = await launch.run(ProcessProvider())

    assert finished.stdout.tail.endswith(f"{script}\n"), finished


async def test_files_that_an_agent_wrote_show_no_further_folder_to_a_verifier(
    make_launch: MakeLaunch, tmp_path: Path
) -> None:
    python = linked_python(tmp_path)
    launch = make_launch("sh", "-c", "true")
    linked, script = launch.workspace / "linked", launch.workspace / "script"
    async with ProcessProvider().open(SandboxRequest(launch.directory)) as sandbox:
        linked.symlink_to(python)
        script.write_text(f"#!{python}\n")
        script.chmod(0o755)
        for program in (linked, script):
            verifier = replace(launch.launch, argv=(str(program),), role="verifier")
            with pytest.raises(NotLaunchable):
                await sandbox.exec(verifier)
            assert (await sandbox.exec(replace(verifier, role="agent"))).exit_code == 0
