"""A process per session on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from typing import Final

from bridle.harnesses.sandboxes.base import (
    Captured,
    Launch,
    LaunchRefused,
    NotLaunchable,
    ProcessResult,
    SandboxLost,
    environment_of,
    prepare,
)
from bridle.harnesses.sandboxes.supervise import new_mark, supervise

_NO_COMMAND: Final = frozenset(
    {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENOEXEC}
)


class ProcessSandbox:
    """Starts each launch as the leader of its own session and process group."""

    async def run(self, launch: Launch) -> ProcessResult:
        prepare(launch)
        mark = new_mark()
        stdout, stderr = launch.logs / "stdout.log", launch.logs / "stderr.log"
        started = time.monotonic()
        with stdout.open("wb") as out, stderr.open("wb") as err:
            try:
                process = await asyncio.create_subprocess_exec(
                    *launch.argv,
                    cwd=launch.workspace,
                    env=environment_of(launch, mark),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                raise _not_started(launch, error) from error
        code = await supervise(_Process(process), mark, launch.timeout_s, launch.grace_s)
        seconds = time.monotonic() - started
        return ProcessResult(code, seconds, Captured.of(stdout), Captured.of(stderr))

    async def close(self) -> None:
        """Nothing outlives a run."""


def _not_started(launch: Launch, error: OSError | ValueError) -> Exception:
    problem = f"cannot start {launch.argv[0]}: {error}"
    if isinstance(error, ValueError) or error.errno == errno.E2BIG:
        return LaunchRefused(problem)
    return NotLaunchable(problem) if error.errno in _NO_COMMAND else SandboxLost(problem)


class _Process:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def wait(self) -> int:
        return await self._process.wait()

    def signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
