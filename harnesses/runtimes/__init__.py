"""Where a harness runs. A runtime takes a :class:`Launch` and returns how it :class:`Finished`.

``local`` starts a process per session; ``warm`` forks Python scripts from a process that has
imported their libraries once. Both kill everything a session started when its time is up.
"""

from bridle.harnesses.runtimes.base import (
    Captured,
    Finished,
    Launch,
    LaunchRefused,
    NotLaunchable,
    Runtime,
    RuntimeLost,
)
from bridle.harnesses.runtimes.local import LocalRuntime
from bridle.harnesses.runtimes.warm import WarmRuntime

__all__ = [
    "Captured",
    "Finished",
    "Launch",
    "LaunchRefused",
    "LocalRuntime",
    "NotLaunchable",
    "Runtime",
    "RuntimeLost",
    "WarmRuntime",
]
