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
from typing import Final

import msgspec

from bridle.errors import BridleError

log = logging.getLogger(__name__)

_PROGRAM: Final = Path(__file__).with_name("namespaced.py")


class StartFailure(BridleError):
    """The command was not started; ``error`` is what the system said."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def namespaced(argv: Sequence[str], status: int, hidden: Sequence[Path]) -> tuple[str, ...]:
    """The command that starts ``argv`` in namespaces of its own and reports to the file descriptor
    ``status``, which it inherits. ``hidden``: files that read as empty inside."""
    paths = json.dumps([str(path) for path in hidden])
    program = (sys.executable, "-I", "-S", str(_PROGRAM), str(status), paths, "--")
    return (*program, *argv)


def started(said: bytes) -> None:
    """Reads what arrived at ``status``. Raises :class:`StartFailure`."""
    if said:
        step, number = msgspec.json.decode(said, type=tuple[str, int])
        raise StartFailure(OSError(number, os.strerror(number), step))


@functools.cache
def missing() -> str | None:
    """Why processes cannot have namespaces of their own here; ``None``: they can. Logged once."""
    if sys.platform != "linux":
        why = f"{sys.platform} has no namespaces"
    else:
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb") as said:
            subprocess.run(namespaced(["true"], writing, ()), pass_fds=(writing,), check=False)
            os.close(writing)
            try:
                started(said.read())
            except StartFailure as failure:
                name = errno.errorcode.get(failure.error.errno or 0, "unknown")
                why = f"{failure.error.filename}: {name}"
            else:
                return None
    log.warning(
        "sandbox_not_isolated: sessions see this machine's processes, and what they leave is found "
        "by its environment only (%s)",
        why,
    )
    return why
