"""Atomic directories, which are there whole or not at all, also after a crash."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from bridle.errors import BridleError

_SCRATCH = re.compile(r"\..+\.(\d+)\.tmp")


class NotWritten(BridleError):
    """A directory could not be written, and is as it was.

    The message has its path and the cause.
    """

    retryable = True


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yield a scratch directory that becomes ``target`` when the block ends well.

    Its files are flushed to disk before the rename. If the block raises, the scratch directory is
    removed and ``target`` is as it was; otherwise an earlier ``target`` is replaced. Leftovers of
    killed processes beside it are removed, too. Raises :class:`NotWritten` if the disk refuses.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.parent / f".{target.name}.{os.getpid()}.tmp"
    for left in target.parent.glob(".*.tmp"):
        owner = _SCRATCH.fullmatch(left.name)
        if left == scratch or (owner and not _lives(int(owner[1]))):
            shutil.rmtree(left, ignore_errors=True)
    scratch.mkdir()
    try:
        yield scratch
        for path in [*scratch.rglob("*"), scratch]:
            _flush(path)
        if target.exists():
            shutil.rmtree(target)
        os.rename(scratch, target)
        _flush(target.parent)
    except (OSError, RuntimeError, SafetensorError) as error:
        # torch and safetensors have errors of their own for a disk that is full.
        shutil.rmtree(scratch, ignore_errors=True)
        raise NotWritten(f"{target} cannot be written: {' '.join(str(error).split())}") from error
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
