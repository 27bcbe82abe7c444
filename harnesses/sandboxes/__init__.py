"""Where one session's harness runs: a sandbox starts a :class:`Launch` and returns a
:class:`ProcessResult`.

``process`` starts a process per session. ``forked`` forks Python scripts from a process that has
imported their libraries once. Both kill everything that a session started when its time is up.
"""

from bridle.harnesses.sandboxes.base import (
    Captured,
    Launch,
    LaunchRefused,
    NotLaunchable,
    ProcessResult,
    Sandbox,
    SandboxLost,
)
from bridle.harnesses.sandboxes.forked import ForkedSandbox
from bridle.harnesses.sandboxes.process import ProcessSandbox

__all__ = [
    "Captured",
    "ForkedSandbox",
    "Launch",
    "LaunchRefused",
    "NotLaunchable",
    "ProcessResult",
    "ProcessSandbox",
    "Sandbox",
    "SandboxLost",
]
