"""The collector and the allocator of a process that is a proxy and nothing else."""

from __future__ import annotations

import ctypes
import gc
import platform
from typing import Final

_M_ARENA_MAX: Final = -8
"""``malloc.h``'s name of the setting."""


def tune_gc() -> None:
    """To be called before a proxy is started that this whole process is for."""
    # What start-up made stays, and the many long-lived turns and few cycles of a recording proxy
    # are little work for a collector. Every stream waits while it looks: often at a few young
    # objects, which takes milliseconds, rarely at all of them.
    gc.freeze()
    gc.set_threshold(1_000, 20, 250)
    _one_heap()


def _one_heap() -> None:
    """Tells glibc to keep one heap for all threads: bodies are made in one thread and let go in
    another, and each thread's own heap would grow with the largest that it ever held."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
