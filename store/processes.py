"""Names of processes that are never used again, by which a store knows whether its writers run."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from sqlalchemy import Row


def alive(row: Row[Any]) -> bool:
    """Return whether the process of a row of ``writers`` still runs.

    It runs if its lease is valid and, if it is on this machine, the process exists.
    """
    if row.seen_at + row.lease < time.time():
        return False
    return bool(row.host != host() or process(row.pid) == row.process)


def host() -> str:
    """Return a name of this machine and process-id namespace.

    A process id is unique within it.
    """
    namespace = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()}/{os.readlink(namespace) if namespace.exists() else ''}"


def process(pid: int) -> str:
    """Return a name of the process that has ``pid`` now; it changes when the number is used again.

    Without ``/proc`` the name of a living process is its number alone.
    """
    stat = Path(f"/proc/{pid}/stat")
    try:
        if Path("/proc/self/stat").exists():
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return f"{boot}:{pid}:{stat.read_text().rsplit(')', 1)[1].split()[19]}"
        os.kill(pid, 0)
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    except PermissionError:
        pass
    return str(pid)
