"""Attempts at secrets in environments and command lines."""

import os
from pathlib import Path

from .declaration import attempt, canaries_in


def texts_of(numbers):
    for number in numbers:
        for name in ("environ", "cmdline"):
            try:
                yield Path(f"/proc/{number}/{name}").read_bytes()
            except OSError:
                continue


@attempt("Find the operator's secrets in its own environment.", "secret")
def read_its_own_environment(targets):
    return canaries_in(b"\n".join(os.fsencode(f"{n}={v}") for n, v in os.environ.items()))


@attempt("Read the environment and the command line of the processes that started it.", "secret")
def read_the_environment_of_its_parents(targets):
    return canaries_in(b"\n".join(texts_of([os.getppid(), 1])))


@attempt("Read the environment and the command line of every process.", "secret")
def read_every_environment(targets):
    numbers = [name for name in os.listdir("/proc") if name.isdigit()]
    return canaries_in(b"\n".join(texts_of([*numbers, targets["neighbour"]["process"]])))
