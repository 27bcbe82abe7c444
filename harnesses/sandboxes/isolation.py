"""Whether this machine lets a process have namespaces of its own, and the command that does so."""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from bridle.errors import BridleError

log = logging.getLogger(__name__)

INNER_PORT: Final = 8484
"""Of the loopback inside, where a session's URL is."""
_PROGRAM: Final = Path(__file__).with_name("namespaced.py")


class StartFailure(BridleError):
    """The command was not started; ``error`` is what the system said."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def namespaced(
    argv: Sequence[str], status: int, hidden: Sequence[Path], way_out: Path | None = None
) -> tuple[str, ...]:
    """The command that starts ``argv`` in namespaces of its own and reports to the file descriptor
    ``status``, which it inherits. ``hidden``: files that read as empty inside. ``way_out``: the
    Unix socket that port :data:`INNER_PORT` of a network of its own leads to; ``None``: the
    machine's network."""
    settings: dict[str, Any] = {"hidden": [str(path) for path in hidden], "way_out": None}
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
    """Reads what arrived at ``status``. Raises :class:`StartFailure`."""
    if said:
        step, number = msgspec.json.decode(said, type=tuple[str, int])
        raise StartFailure(OSError(number, os.strerror(number), step))


@functools.cache
def missing() -> str | None:
    """Why processes cannot have namespaces of their own here; ``None``: they can. Logged once."""
    why = _refused(None)
    if why is not None:
        log.warning(
            "sandbox_not_isolated: sessions see this machine's processes, and what they leave is "
            "found by its environment only (%s)",
            why,
        )
    return why


@functools.cache
def network_missing() -> str | None:
    """Why processes cannot have a network of their own here; ``None``: they can. Logged once."""
    if (why := missing()) is not None:
        return why  # that has been logged
    why = _refused(Path("/nothing"))
    if why is not None:
        log.warning("sandbox_on_open_network: sessions reach this machine's network (%s)", why)
    return why


def _refused(way_out: Path | None) -> str | None:
    """The step that the machine refuses; ``None`` when it refuses none."""
    if sys.platform != "linux":
        return f"{sys.platform} has no namespaces"
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as said:
        command = namespaced(["true"], writing, (), way_out)
        subprocess.run(command, pass_fds=(writing,), check=False)
        os.close(writing)
        try:
            started(said.read())
        except StartFailure as failure:
            name = errno.errorcode.get(failure.error.errno or 0, "unknown")
            return f"{failure.error.filename}: {name}"
    return None
