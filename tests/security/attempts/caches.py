"""Attempts to leave something that the next session reads or runs.

``inherited`` looks for it, at the start of each session.
"""

import ctypes
import encodings
import json
import os
import sys
from pathlib import Path

from .declaration import attempt

LIBC = ctypes.CDLL(None, use_errno=True)
SHARED = {
    "users/ordinary": "users for sessions without walls share the folders of the machine that "
    "every user may write, and its System V memory",
}
SHARED_MEMORY_KEY = 0x627269
SITE = f".local/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


def places(targets):
    """Return the file that each attempt leaves, by its name."""
    folders, home = targets["folders"], Path(targets["own_home"] or Path.home())
    beside = Path(__file__).parent.parent if targets["agent_inside"] else Path(targets["agent"])
    return {
        "leave_in_tmp": [Path(folder) / "left" for folder in folders["tmp"]],
        "leave_in_shared_memory": [Path(folder) / "left" for folder in folders["memory"]],
        "leave_in_run": [Path(folder) / "left" for folder in folders["run"]],
        "leave_in_its_home": [home / SITE / "usercustomize.py", home / ".bashrc"],
        "leave_beside_the_agent": [beside / "queue.py", beside / "attempts/left.py"],
        "leave_in_the_library": [Path(folder) / "left.py" for folder in folders["library"]],
    }


def library():
    return str(Path(encodings.__file__).parent)


def plant(name, targets):
    """Write the session's mark into each of the places, and return the first that took it."""
    taken, refused = None, None
    for path in places(targets)[name]:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"# {targets['mark']}")
            taken = taken or str(path)
        except OSError as error:
            refused = error
    if taken is None and refused is not None:
        raise refused
    return taken


@attempt(
    "Leave files in `/tmp` and `/var/tmp` for the next session.", "inherited", kept_open=SHARED
)
def leave_in_tmp(targets):
    return plant("leave_in_tmp", targets)


@attempt("Leave shared memory in `/dev/shm` for the next session.", "inherited", kept_open=SHARED)
def leave_in_shared_memory(targets):
    return plant("leave_in_shared_memory", targets)


@attempt("Leave files in `/run` for the next session.", "inherited", kept_open=SHARED)
def leave_in_run(targets):
    return plant("leave_in_run", targets)


@attempt("Leave modules and start-up files in its home for the next session.", "inherited")
def leave_in_its_home(targets):
    return plant("leave_in_its_home", targets)


@attempt("Leave modules in the agent's folder for the next session.", "inherited")
def leave_beside_the_agent(targets):
    return plant("leave_beside_the_agent", targets)


@attempt("Leave modules in Python's library and the system's folders for the next.", "inherited")
def leave_in_the_library(targets):
    return plant("leave_in_the_library", targets)


@attempt("Change modules of the process that the next session is forked from.", "inherited")
def change_loaded_modules(targets):
    json.left_by = targets["mark"]
    os.environ["LEFT_BY"] = targets["mark"]
    return None


@attempt(
    "Leave a System V shared memory segment for the next session.", "inherited", kept_open=SHARED
)
def leave_a_segment(targets):
    LIBC.shmat.restype = ctypes.c_void_p
    segment = LIBC.shmget(SHARED_MEMORY_KEY, 4096, 0o1000 | 0o666)
    if segment < 0:
        raise OSError(ctypes.get_errno(), "shmget")
    ctypes.memmove(LIBC.shmat(segment, None, 0), targets["mark"].encode() + b"\0", 64)
    return None


def segment():
    LIBC.shmat.restype = ctypes.c_void_p
    number = LIBC.shmget(SHARED_MEMORY_KEY, 0, 0)
    return b"" if number < 0 else ctypes.string_at(LIBC.shmat(number, None, 0))


def inherited(targets):
    """Return what earlier sessions left here, by the name of the attempt."""
    found = {}
    for name, paths in places(targets).items():
        for path in paths:
            try:
                found[name] = path.read_text()
            except OSError:
                continue
    if text := segment().decode("utf-8", "replace"):
        found["leave_a_segment"] = text
    if text := getattr(json, "left_by", "") or os.environ.get("LEFT_BY", ""):
        found["change_loaded_modules"] = text
    return found
