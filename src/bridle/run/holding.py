"""The lock of an output folder, to which only one command writes at a time."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bridle.errors import BridleError, UsageError

log = logging.getLogger(__name__)

LOCK: Final = ".lock"
"""The name of the lock file inside a folder that is written step by step."""


class OutputBusy(BridleError):
    """Another process writes to the output folder."""

    retryable = True


class OutputUnwritable(UsageError):
    """The output folder cannot be made or written to."""


@contextmanager
def hold(output: Path, lock: Path) -> Iterator[None]:
    """Keep other commands from writing to ``output`` while the context is open.

    ``lock`` is a file that each of them locks; its folder is made. The kernel releases the lock
    however its holder ends. Raise :class:`OutputBusy` and :class:`OutputUnwritable`.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("ab")
    except OSError as error:
        raise OutputUnwritable(f"cannot write to --out {output}: {error.strerror}") from error
    with file:
        busy = OutputBusy(
            f"another command is writing to {output}: let it end, or name another --out"
        )
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise busy from None
        except OSError as error:
            log.warning("%s cannot be locked: %s", lock, error)
        if not lock.exists() or not os.path.samestat(lock.stat(), os.fstat(file.fileno())):
            raise busy  # Its holder has just removed it.
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
