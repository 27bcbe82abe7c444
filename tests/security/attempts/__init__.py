"""The attempts of an agent at its reward, at its neighbours and at its run: one module a class.

The modules are copied into a session and run there (``session.py``), so they import the standard
library alone. ``security.stage`` has the world around them and judges them from outside.
"""

from . import (
    caches,
    cleanup,
    environments,
    files,
    keys,
    processes,
    signals,
    sockets,
    task_folders,
    verifier_inputs,
)
from .declaration import ATTEMPTS, SIGNS, Attempt

__all__ = [
    "ATTEMPTS",
    "SIGNS",
    "Attempt",
    "caches",
    "cleanup",
    "environments",
    "files",
    "keys",
    "processes",
    "signals",
    "sockets",
    "task_folders",
    "verifier_inputs",
]
