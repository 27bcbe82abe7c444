"""The walls around a session: the files, processes and network that it has, made by bubblewrap.

Inside are the system's directories, the Python that runs Bridle and the folders that a launch
names, all read-only; the session's own folders; and a ``/tmp``, ``/run``, ``/dev`` and ``/proc`` of
its own. Nothing else of the machine is there: no home, no key, no store, no other session, no
socket. The network is a loopback with one port, whose listening socket Bridle holds.

:class:`Walls` has the settings, and ``mounts.py`` the list of mounts. A process inside reports its
start to ``entrance.py``. :meth:`Walls.held` keeps walls open for a process that ``zygote.py`` forks
into them.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Final

from bridle.errors import UsageError
from bridle.harnesses.permissions import permits_unsafe_sandbox
from bridle.harnesses.sandboxes.mounts import mounts

log = logging.getLogger(__name__)

_HOLD: Final = "echo >&2; exec 2>&-; until (read _; :); do :; done"
"""The first process of walls that are held: it waits for all orphans, and ends with its input.

Shells wait for orphans only while they wait for a child of their own. The child is started again
when a session kills it.
"""


class NoWalls(UsageError):
    """This machine gives sessions no walls, and the user did not say that they may run without."""


@dataclass(frozen=True, slots=True)
class Walls:
    """The settings of a session's walls."""

    own: tuple[tuple[str, str], ...]
    """Folders that can be written, each with its path inside."""
    tmp: str
    """The folder that is ``/tmp`` inside."""
    shown: tuple[str, ...] = ()
    """Further files and folders that are visible, read-only."""
    hidden: tuple[str, ...] = ()
    """Files and folders that are not visible, wherever they lie. A file is hidden with its
    siblings, the files of its folder whose names begin with its name."""
    network: bool = True
    """True if the network is the session's own."""
    user: int | None = None
    """The user that the command becomes; ``None`` means this process's own."""

    def command(self, *options: str) -> list[str]:
        """Return the command of bubblewrap up to the program that it starts."""
        capabilities = ("CAP_SETUID", "CAP_SETGID") if self.user is not None else ()
        return [
            *(
                _bubblewrap(),
                "--die-with-parent",
                "--unshare-pid",
                "--unshare-ipc",
                "--unshare-uts",
            ),
            *(("--unshare-net",) if self.network else ()),
            *("--cap-drop", "ALL"),
            *(part for name in capabilities for part in ("--cap-add", name)),
            *mounts(self.own, self.tmp, self.shown, self.hidden),
            *options,
            "--",
        ]

    def held(self) -> list[str]:
        """Return the command of walls that stand without a program, for ``zygote.py`` to enter."""
        options = ("--json-status-fd", "1", "--as-pid-1")
        return [*self.command(*options), "/bin/sh", "-c", _HOLD]


def _bubblewrap() -> str:
    return shutil.which("bwrap") or "bwrap"


@functools.cache
def missing() -> str | None:
    """Return the reason why sessions cannot have walls here, or ``None`` if they can."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    with tempfile.TemporaryDirectory(prefix="bridle-") as folder:
        command = [*Walls((), folder).command(), "true"]
        tried = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else tried.stderr.strip() or f"exit {tried.returncode}"


def walled(users: object | None) -> bool:
    """Return whether sessions get walls here.

    A user namespace knows one user, so that only root gives a session both a user of ``users`` and
    walls; users alone keep sessions apart, too. Raise :class:`NoWalls` if there are neither, unless
    the user permits that.
    """
    if users is not None and os.getuid() != 0:
        return False
    why = missing()
    if why is None:
        return True
    if users is None and not permits_unsafe_sandbox():
        raise NoWalls(
            f"agents cannot be kept apart from this machine's files: {why}. Install bubblewrap "
            "(apt-get install bubblewrap), run sessions in containers "
            "(--set agent.sandbox=container), or run them as this user, with this user's files "
            "and network (--unsafe-sandbox)"
        )
    _warn(why)
    return False


@functools.cache
def _warn(why: str) -> None:
    log.warning(
        "sandbox_not_isolated: sessions see this machine's files, processes and network, the admin "
        "key and the store among them (%s)",
        why,
    )
