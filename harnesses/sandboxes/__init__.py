"""Where a harness runs. A runtime takes a :class:`Launch` and returns how it :class:`Finished`.

``local`` starts a process per session; ``warm`` forks Python scripts from a process that has
imported their libraries once. Both kill everything a session started when its time is up.
"""

from bridle.harnesses.sandboxes.base import (
    Captured,
    Finished,
    Launch,
    LaunchRefused,
    NotLaunchable,
    Runtime,
    RuntimeLost,
)
from bridle.harnesses.sandboxes.forked import WarmRuntime
from bridle.harnesses.sandboxes.process import LocalRuntime

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
