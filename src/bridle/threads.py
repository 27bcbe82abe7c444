"""The number of threads with which a command computes, and how they wait for each other.

PyTorch reads both settings from the environment when it is first imported. The command line
therefore sets them before it loads a command, which then imports PyTorch or starts processes that
do. A variable that the user has set is kept.

OpenMP's threads spin while they wait for work. That saves microseconds on an idle machine. If
another process wants the core, however, a spinning thread can keep the very thread that it waits
for from running. A command that shares its machine with the engine, the proxy and the agents that
it starts takes half of the cores. A command that trains alone takes all of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, MutableMapping
from pathlib import Path
from typing import Final, Literal

Share = Literal["alone", "shared", "own"]
"""The way in which a command uses the cores: it has the machine to itself (``alone``), shares it
(``shared``), or chooses its number of threads itself (``own``)."""

COMPUTES: Final[dict[str, Share]] = {
    "sft": "alone",
    "engine": "own",
    "train": "shared",
    "demo": "shared",
    "reproduce": "shared",
    "eval": "shared",
}
"""The commands that compute, or start processes that do, by name."""

_CPUS: Final = Path("/sys/devices/system/cpu")
_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")


def set_thread_defaults(command: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that ``command`` needs in ``environment``.

    Variables that the user has set are left.
    """
    share = COMPUTES.get(command)
    if share is None:
        return
    if share != "own":
        cores = usable_cores()
        threads = cores if share == "alone" else max(1, cores // 2)
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    # Agents are forked from processes that have tokenised: threads of the tokenizer would hang.
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")


def usable_cores(cpus: Path = _CPUS, quota: Path = _QUOTA) -> int:
    """Return the number of physical cores that this process may use.

    They are those of its CPU affinity, but at most a container's quota. Two hardware threads of one
    core compute no faster than one, so they count once.
    """
    allowed = _affinity()
    cores = len({_siblings(cpus, cpu) for cpu in allowed})
    return max(1, min(cores, _quota(quota) or cores))


def _affinity() -> Iterable[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _siblings(cpus: Path, cpu: int) -> str:
    """Return the hardware threads of the core of ``cpu``.

    If the system does not list them, it is ``cpu`` alone.
    """
    try:
        return (cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota(file: Path) -> int | None:
    """Return the whole cores of the control group's quota, at least 1.

    The quota is ``QUOTA PERIOD``. Return ``None`` if there is no quota.
    """
    try:
        given, period = file.read_text().split()
        return max(1, int(given) // int(period))
    except (OSError, ValueError):  # no file, or "max"
        return None
