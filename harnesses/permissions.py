"""The permissions that a user gives to sessions and tasks on this machine, beyond their walls.

Permissions are kept in environment variables, so that processes which this one starts have them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from bridle.errors import UsageError

UNSAFE_SANDBOX: Final = "BRIDLE_UNSAFE_SANDBOX"
"""The variable that permits sessions without walls: ``1``."""
SESSION_ENV: Final = "BRIDLE_SANDBOX_ENV"
"""The variable that names further variables for sessions, with commas."""
SHOWN: Final = "BRIDLE_SANDBOX_SHOWN"
"""The variable that names files and folders for sessions, separated as in ``PATH``."""
TASK_ENV: Final = "BRIDLE_TASK_ENV"
"""The variable that names the variables which tasks may take, with commas."""


@dataclass(frozen=True, slots=True)
class Permissions:
    """The permissions of one run."""

    unsafe_sandbox: bool = False
    """True if sessions may run without walls, where this machine gives them none."""
    env: tuple[str, ...] = ()
    """Names of variables of this machine that sessions get."""
    shown: tuple[str, ...] = ()
    """Files and folders of this machine that sessions see, read-only."""
    task_env: tuple[str, ...] = ()
    """Names of variables of this machine that a task may take as ``${NAME}``."""

    def grant(self) -> None:
        """Permit it from now on, in addition to what the environment already permits.

        Raise :class:`bridle.errors.UsageError` for a path that does not exist.
        """
        paths = [os.path.abspath(os.path.expanduser(path)) for path in self.shown]
        if missing := [path for path in paths if not os.path.exists(path)]:
            raise UsageError(f"agent.shown names {missing[0]}, which does not exist")
        if paths:
            os.environ[SHOWN] = os.pathsep.join(sorted({*shown_paths(), *paths}))
        if self.unsafe_sandbox:
            os.environ[UNSAFE_SANDBOX] = "1"
        for variable, names in ((SESSION_ENV, self.env), (TASK_ENV, self.task_env)):
            if names:
                os.environ[variable] = ",".join(sorted({*names_in(variable), *names}))


NO_PERMISSIONS: Final = Permissions()


def permits_unsafe_sandbox() -> bool:
    """Return whether sessions may run without walls."""
    return os.environ.get(UNSAFE_SANDBOX) == "1"


def shown_paths() -> tuple[str, ...]:
    """Return the files and folders that sessions see besides those that each one needs."""
    return tuple(filter(None, os.environ.get(SHOWN, "").split(os.pathsep)))


def names_in(variable: str, environment: Mapping[str, str] = os.environ) -> frozenset[str]:
    listed = environment.get(variable, "").split(",")
    return frozenset(name.strip() for name in listed if name.strip())
