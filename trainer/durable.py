"""Directories that are there whole or not at all, also after a crash."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """A scratch directory that becomes ``target`` when the block ends well.

    Its files are flushed to disk before the rename. When the block raises, the scratch directory is
    removed and ``target`` is as it was; an earlier ``target`` is replaced.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.parent / f".{target.name}.{os.getpid()}.tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        yield scratch
        for path in [*scratch.rglob("*"), scratch]:
            _flush(path)
        if target.exists():
            shutil.rmtree(target)
        os.rename(scratch, target)
        _flush(target.parent)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
