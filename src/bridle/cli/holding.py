"""An output folder for one command at a time."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import typer

from bridle.cli.terminal import fail

log = logging.getLogger(__name__)

LOCK: Final = ".lock"
"""In a folder that is written to step by step."""


def hold(context: typer.Context, output: Path, lock: Path) -> None:
    """Keeps other commands from ``output`` until this one is over; ends it when one is there.

    ``lock`` is a file that both would open; its folder is made. However its holder ends, the kernel
    lets go of it.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--out {output} cannot be made: {error.strerror}", 2)
    try:
        context.with_resource(_locked(lock))
    except BlockingIOError:
        fail(f"another command is writing to {output}: let it end, or name another --out")
    except OSError as error:
        fail(f"--out {output} cannot be written to: {error.strerror}", 2)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError as error:
            log.warning("%s cannot be locked: %s", path, error)
        if not path.exists() or not os.path.samestat(path.stat(), os.fstat(file.fileno())):
            raise BlockingIOError  # Its holder has just removed it.
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
