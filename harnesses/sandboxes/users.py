"""A user of its own for each session, where Bridle may change users.

``BRIDLE_SESSION_USERS=20001-24096`` names the user numbers. A process that is not root needs the
capabilities SETUID, SETGID, CHOWN and KILL for it, and no others; the trainer's container of a
compose set-up has them. A session's processes then cannot read Bridle's own data (keys, store,
environment) nor another session's, and none of them outlives the session.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from bridle.errors import UsageError

VARIABLE: Final = "BRIDLE_SESSION_USERS"
NEEDED: Final = {"chown": 0, "kill": 5, "setgid": 6, "setuid": 7}
"""Linux's numbers of the capabilities."""
_RANGE: Final = re.compile(r"(\d+)-(\d+)")
_PATIENCE: Final = 100
"""Maximum rounds of killing processes that start others meanwhile."""


class SessionUsers:
    """The numbers of users that no session has at the moment."""

    def __init__(self, numbers: range) -> None:
        self._numbers = itertools.cycle(numbers)
        self._taken: set[int] = set()
        self._most = len(numbers)

    @classmethod
    def of_environment(cls) -> SessionUsers | None:
        """Return the users that ``BRIDLE_SESSION_USERS`` names, or ``None`` if it is not set.

        Raise :class:`bridle.errors.UsageError` for a value that is no range, and if this process
        may not change users.
        """
        named = os.environ.get(VARIABLE)
        if not named:
            return None
        found = _RANGE.fullmatch(named)
        numbers = range(int(found[1]), int(found[2]) + 1) if found else range(0)
        if not numbers or 0 in numbers or os.getuid() in numbers:
            raise UsageError(f"{VARIABLE}={named} is no range of users without root and this one")
        if absent := [name for name, bit in NEEDED.items() if not _effective() >> bit & 1]:
            raise UsageError(
                f"{VARIABLE} needs the capabilities {', '.join(absent)}: run as root, or give them "
                "as deploy/image/train.sh does"
            )
        return cls(numbers)

    @contextlib.contextmanager
    def one(self) -> Iterator[int]:
        """Yield a user for one session; everything that still runs as it is killed at the end."""
        if len(self._taken) == self._most:
            raise UsageError(f"{VARIABLE} has {self._most} users, fewer than sessions at a time")
        user = next(number for number in self._numbers if number not in self._taken)
        self._taken.add(user)
        try:
            yield user
        finally:
            kill_all_of(user)
            self._taken.discard(user)


@contextlib.contextmanager
def one_of(users: SessionUsers | None) -> Iterator[int | None]:
    """Yield a user for one session, or ``None`` for this process's own if there are none."""
    if users is None:
        yield None
        return
    with users.one() as user:
        yield user


def as_user(user: int, argv: Sequence[str]) -> tuple[str, ...]:
    """Return the command that runs ``argv`` as ``user``, without capabilities (util-linux)."""
    to = (f"--reuid={user}", f"--regid={user}", "--clear-groups")
    return ("setpriv", *to, "--inh-caps=-all", "--ambient-caps=-all", "--", *argv)


def give(directory: Path, user: int) -> None:
    """Give ``directory`` and all that is in it to the user, closed to others.

    This process's group may enter it, so that a process of this user can start there before it
    becomes the other's.
    """
    found, pending = [], [str(directory)]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                found.append(entry.path)
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
    # What is in a folder comes before it: without further rights, its new owner alone may enter.
    for path in reversed(found):
        os.chown(path, user, user, follow_symlinks=False)
    directory.chmod(0o770)
    os.chown(directory, user, os.getgid())


def kill_all_of(user: int) -> None:
    """Kill every process of ``user``, until there is none.

    A process of the user itself signals all at once. A process that goes on as another one again
    and again can be missed by whoever reads ``/proc``, but not by the kernel.
    """
    for _ in range(_PATIENCE):
        every = as_user(user, ("sh", "-c", "kill -KILL -1"))
        subprocess.run(every, capture_output=True, check=False)
        if not any(_owner(pid) == user for pid in _processes()):
            return


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _owner(pid: int) -> int | None:
    """Return the real user of a process that has not ended, or ``None`` for others."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    return None if fields["State"].startswith("Z") else int(fields["Uid"].split()[0])


def _effective() -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^CapEff:\s*(\w+)$", status, re.MULTILINE)
    return int(found[1], 16) if found else 0
