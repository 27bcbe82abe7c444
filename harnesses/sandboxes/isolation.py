"""The check whether this machine permits a process namespaces, and the command to make them."""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from bridle.errors import BridleError

log = logging.getLogger(__name__)

INNER_PORT: Final = 8484
"""Port of the loopback inside at which a session's URL is."""
_PROGRAM: Final = Path(__file__).with_name("namespaced.py")


class StartFailure(BridleError):
    """The command was not started. ``error`` is the system's error."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True)
class Walls:
    """The settings of ``walls.py``: the files that a session sees."""

    own: tuple[str, ...]
    tmp: str
    shown: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()


_BELOW_TMP: Final = re.compile(r"/tmp/[^/\s'\":;,=]+")  # noqa: S108 - what a launch names there


def below_tmp(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the existing files and folders directly below ``/tmp`` that ``texts`` name.

    Scripts, environments and search paths may lie there.
    """
    named = {path for text in texts for path in _BELOW_TMP.findall(text)}
    return tuple(sorted(path for path in named if os.path.exists(path)))


def namespaced(
    argv: Sequence[str],
    status: int,
    walls: Walls | None = None,
    directory: str = "/",
    way_out: Path | None = None,
) -> tuple[str, ...]:
    """Return the command that starts ``argv`` in namespaces of its own.

    It reports to the file descriptor ``status``, which it inherits. With ``walls`` the process
    starts in ``directory``; without, it sees the machine's files. ``way_out`` is the Unix socket to
    which port :data:`INNER_PORT` of its own network leads; ``None`` means the machine's network.
    """
    settings: dict[str, Any] = {
        "walls": None if walls is None else asdict(walls),
        "directory": directory,
        "way_out": None,
    }
    if way_out is not None:
        keeper = str(_PROGRAM.parent / "container/inside")
        settings["way_out"] = {
            "port": INNER_PORT,
            "socket_path": str(way_out),
            "program": keeper,
        }
    program = (sys.executable, "-I", "-S", str(_PROGRAM), str(status), json.dumps(settings), "--")
    return (*program, *argv)


def started(said: bytes) -> None:
    """Check the bytes that arrived at ``status``. Raise :class:`StartFailure` if there are any."""
    if said:
        step, number = msgspec.json.decode(said, type=tuple[str, int])
        raise StartFailure(OSError(number, os.strerror(number), step))


@functools.cache
def missing() -> str | None:
    """Return the reason why processes cannot have namespaces of their own here.

    Return ``None`` if they can. The reason is logged once.
    """
    why = _refused(None)
    if why is not None:
        log.warning(
            "sandbox_not_isolated: sessions see this machine's files and processes, the admin key "
            "and the store among them, and what they leave is found by its environment only; "
            "a container (agent.sandbox) keeps them apart (%s)",
            why,
        )
    return why


@functools.cache
def network_missing() -> str | None:
    """Return the reason why processes cannot have a network of their own here.

    Return ``None`` if they can. The reason is logged once.
    """
    if (why := missing()) is not None:
        return why  # that has been logged
    why = _refused(Path("/nothing"))
    if why is not None:
        log.warning("sandbox_on_open_network: sessions reach this machine's network (%s)", why)
    return why


def _refused(way_out: Path | None) -> str | None:
    """Return the step that the machine refuses, or ``None`` if it refuses none."""
    if sys.platform != "linux":
        return f"{sys.platform} has no namespaces"
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as said, tempfile.TemporaryDirectory(prefix="bridle-") as folder:
        walls = Walls((folder,), folder)
        command = namespaced(["true"], writing, walls, folder, way_out)
        subprocess.run(command, pass_fds=(writing,), check=False)
        os.close(writing)
        try:
            started(said.read())
        except StartFailure as failure:
            name = errno.errorcode.get(failure.error.errno or 0, "unknown")
            return f"{failure.error.filename}: {name}"
    return None
