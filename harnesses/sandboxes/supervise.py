"""Waits for a session's process and ends everything that it started.

A harness's tools leave its process group on purpose (a shell per command, servers in the
background), so a group signal is not enough. Walls end all that is in them. Without walls, a
session's environment carries a mark of its own that its descendants inherit. Where ``/proc`` shows
environments, every process with the mark is ended too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from pathlib import Path
from typing import Protocol

from bridle.harnesses.sandboxes.base import Launch

MARK = "BRIDLE_PROCESS_MARK"
"""Environment variable that marks every process a launch started."""


def new_mark() -> str:
    return secrets.token_hex(12)


def environment_of(launch: Launch, directory: Path, mark: str | None) -> dict[str, str]:
    marked = {} if mark is None else {MARK: mark}
    return {**launch.environment, "PWD": str(directory), **marked}


class Child(Protocol):
    """A started process that leads its own process group."""

    async def wait(self) -> int:
        """Return the exit code, ``-n`` after signal n. It may be awaited again."""

    def signal_group(self, number: int) -> None:
        """Signal the group; a group that is gone is no error."""


async def supervise(child: Child, mark: str | None, timeout_s: float, grace_s: float) -> int | None:
    """Wait for ``child`` and return its exit code, or ``None`` at the time limit.

    The exit code is 128 + n after signal n. On the time limit and on cancellation, the tree gets
    SIGTERM, and SIGKILL ``grace_s`` later. In any case, everything of the tree that remains after
    the process has ended is killed.
    """
    ended = asyncio.ensure_future(child.wait())
    try:
        code = await asyncio.wait_for(asyncio.shield(ended), timeout_s)
    except TimeoutError:
        await _end(child, mark, ended, grace_s)
        return None
    except asyncio.CancelledError:
        await asyncio.shield(_end(child, mark, ended, grace_s))
        raise
    child.signal_group(signal.SIGKILL)
    kill_marked(mark)
    return code if code >= 0 else 128 - code


async def _end(child: Child, mark: str | None, ended: asyncio.Future[int], grace_s: float) -> None:
    child.signal_group(signal.SIGTERM)
    signal_marked(mark, signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(ended), grace_s)
    child.signal_group(signal.SIGKILL)
    kill_marked(mark)
    await ended


def kill_marked(mark: str | None) -> None:
    """Kill every process with ``mark``, and repeat while there are some.

    They may be starting others.
    """
    for _ in range(5):
        if not signal_marked(mark, signal.SIGKILL):
            return


def signal_marked(mark: str | None, number: int) -> int:
    """Signal every process whose start environment carries ``mark``; return their number.

    Do nothing where there is no ``/proc`` (macOS); there, only the process group is signalled.
    ``None`` is the mark of processes that walls end.
    """
    if mark is None:
        return 0
    wanted = f"{MARK}={mark}".encode()
    count = 0
    for pid in _own_processes():
        try:
            with open(f"/proc/{pid}/environ", "rb") as stream:
                if wanted not in stream.read():
                    continue
            os.kill(pid, number)
            count += 1
        except (ProcessLookupError, PermissionError, FileNotFoundError):
            continue
    return count


def _own_processes() -> list[int]:
    user = os.getuid()
    found = []
    with contextlib.suppress(FileNotFoundError), os.scandir("/proc") as entries:
        for entry in entries:
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if entry.stat().st_uid == user:
                    found.append(int(entry.name))
    return found
