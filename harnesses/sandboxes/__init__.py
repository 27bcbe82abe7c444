"""Places where a session's harness and verifier run.

A :class:`SandboxProvider` opens a :class:`Sandbox` per session, which runs a :class:`Launch` and
returns a :class:`ProcessResult`.

``process`` starts processes in a folder of this machine. ``forked`` forks Python agents from a
process that has imported their libraries once. ``container`` drives docker or podman.
"""

from bridle.harnesses.install import NotLaunchable
from bridle.harnesses.sandboxes.base import (
    Captured,
    DirectoryGone,
    Launch,
    LaunchRefused,
    Place,
    ProcessResult,
    Sandbox,
    SandboxLost,
    SandboxProvider,
    SandboxRequest,
)
from bridle.harnesses.sandboxes.container import ContainerProvider
from bridle.harnesses.sandboxes.forked import ForkedProvider, ForkedSandbox
from bridle.harnesses.sandboxes.process import ProcessProvider, ProcessSandbox

__all__ = [
    "Captured",
    "ContainerProvider",
    "DirectoryGone",
    "ForkedProvider",
    "ForkedSandbox",
    "Launch",
    "LaunchRefused",
    "NotLaunchable",
    "Place",
    "ProcessProvider",
    "ProcessResult",
    "ProcessSandbox",
    "Sandbox",
    "SandboxLost",
    "SandboxProvider",
    "SandboxRequest",
]
