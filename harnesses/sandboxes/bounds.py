"""Bounds on what a session's processes take of this machine, measured while they run.

A session that takes more is ended alone, and its result names the bound. Containers have limits of
their own (``spec.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_EVERY_S: Final = 0.5
"""Seconds between two measurements of processes and memory."""
_DISK_SHARE: Final = 20
"""A measurement of the disk is followed by a pause of so many times its duration."""
_DISK_EVERY_S: Final = 2.0
"""Minimum seconds between two measurements of the disk."""
_MIB: Final = 1 << 20
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def _half_of_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * _PAGE // _MIB // 2


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of one session; 0 stands for none."""

    processes: int = 1024
    memory_mb: int = _half_of_memory()
    """MiB of memory that its processes have for themselves. The default is half the machine's."""
    disk_mb: int = 20_480
    """MiB in the session's folders, in its ``/tmp`` and in its processes' output streams."""
    verifier_s: float = 600.0
    """Seconds of a verifier function, and of its process on the CPU."""

    def __post_init__(self) -> None:
        if min(self.processes, self.memory_mb, self.disk_mb, self.verifier_s) < 0:
            raise ValueError("a bound of a session is less than 0")


class Watch:
    """The measurement of one session. It ends the session's processes if they exceed a bound."""

    def __init__(self, bounds: Bounds, folders: Iterable[Path]) -> None:
        self.exceeded: str | None = None
        """The bound that was exceeded, in words; ``None`` if there is none."""
        self._bounds = bounds
        self._folders = tuple(folders)
        self._disk_at = 0.0
        self._running: asyncio.Task[None] | None = None

    def begin(self, process: int) -> None:
        """Measure from now on all processes inside the walls of ``process``."""
        with contextlib.suppress(OSError):
            # A process that is about to fork into walls is still outside of them itself.
            walls = os.readlink(f"/proc/{process}/ns/pid_for_children")
            # The number may be another process's by now, which is not to be ended.
            if walls != os.readlink("/proc/self/ns/pid"):
                self._running = asyncio.create_task(self._measure(walls))

    def begin_user(self, user: int) -> None:
        """Measure from now on all processes of ``user``."""
        self._running = asyncio.create_task(self._measure(user))

    def end(self) -> None:
        """Stop the measurement."""
        if self._running is not None:
            self._running.cancel()

    async def _measure(self, group: Hashable) -> None:
        began = time.monotonic()
        while self.exceeded is None:
            # Walls of an earlier session may have had the same number.
            members = await _CENSUS.members(group, since=began)
            self.exceeded = self._of_processes(members) or await self._of_disk()
            if self.exceeded is None:
                await asyncio.sleep(_EVERY_S)
        while members := await _CENSUS.members(group, since=time.monotonic()):
            for process in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    def _of_processes(self, members: Iterable[int]) -> str | None:
        processes, memory = 0, 0
        for process in members:
            processes += 1
            memory += _private_bytes(process)
        if 0 < self._bounds.processes < processes:
            return f"{processes} processes, and at most {self._bounds.processes} are permitted"
        return _above("memory", memory, self._bounds.memory_mb)

    async def _of_disk(self) -> str | None:
        began = time.monotonic()
        if not self._bounds.disk_mb or began < self._disk_at:
            return None
        enough = self._bounds.disk_mb * _MIB
        taken = await asyncio.to_thread(disk_bytes, self._folders, enough)
        ended = time.monotonic()
        self._disk_at = ended + max(_DISK_EVERY_S, _DISK_SHARE * (ended - began))
        return _above("disk", taken, self._bounds.disk_mb)


def _above(name: str, taken: int, bound_mb: int) -> str | None:
    if not bound_mb or taken <= bound_mb * _MIB:
        return None
    return f"{taken // _MIB} MiB of {name}, and at most {bound_mb} are permitted"


class _Census:
    """The processes of this machine by walls and by user, read once for all sessions."""

    def __init__(self) -> None:
        self._groups: dict[Hashable, list[int]] = {}
        self._read_at = 0.0

    async def members(self, group: Hashable, *, since: float) -> list[int]:
        """Return the processes of a group, as they were found at ``since`` or later."""
        now = time.monotonic()
        if self._read_at < max(since, now - _EVERY_S / 2):
            self._groups = await asyncio.to_thread(_grouped_processes)
            self._read_at = now
        return self._groups.get(group, [])


_CENSUS: Final = _Census()


def _grouped_processes() -> dict[Hashable, list[int]]:
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                groups[os.stat(f"/proc/{name}").st_uid].append(int(name))
                groups[os.readlink(f"/proc/{name}/ns/pid")].append(int(name))
    return groups


def _private_bytes(process: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        fields = Path(f"/proc/{process}/statm").read_bytes().split()
        return (int(fields[1]) - int(fields[2])) * _PAGE
    return 0


def disk_bytes(folders: Iterable[Path], enough: int) -> int:
    """Return the bytes on disk of everything in ``folders``, or a number above ``enough``.

    No link is followed, and the sum stops at the first file with which it exceeds ``enough``.
    """
    taken, waiting = 0, [str(folder) for folder in folders]
    while waiting and taken <= enough:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    taken += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                if taken > enough:
                    break
    return taken
