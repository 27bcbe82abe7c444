"""The adapters of the harnesses.

An adapter states how its harness is launched on a task, connected to a session, and asked for its
answer.
"""

from collections.abc import Callable
from typing import Final

from bridle.harnesses.adapters.base import Access, Adapter, Configurable
from bridle.harnesses.adapters.command import Command
from bridle.harnesses.adapters.python_agent import PythonAgent
from bridle.registry import Registry

_HERE = "bridle.harnesses.adapters"
ADAPTERS: Final[Registry[Callable[[], Adapter]]] = Registry(
    "harness",
    "bridle.adapters",
    {
        "codex": f"{_HERE}.codex:Codex",
        "claude-code": f"{_HERE}.claude_code:ClaudeCode",
        "qwen-code": f"{_HERE}.qwen_code:QwenCode",
        "pi": f"{_HERE}.pi:Pi",
        "opencode": f"{_HERE}.opencode:OpenCode",
        "gemini-cli": f"{_HERE}.gemini_cli:GeminiCli",
        "mini-swe-agent": f"{_HERE}.mini_swe_agent:MiniSweAgent",
        "oracle": f"{_HERE}.oracle:Oracle",
        "verifiers": f"{_HERE}.environment_player:EnvironmentPlayer",
    },
)
"""The harnesses that are named on a command line. A part is a class or a function that makes an
:class:`Adapter` without arguments."""

PROGRAMS: Final = {
    "codex": "codex",
    "claude": "claude-code",
    "qwen": "qwen-code",
    "pi": "pi",
    "opencode": "opencode",
    "gemini": "gemini-cli",
    "mini": "mini-swe-agent",
}
"""The harness of each program that ``bridle run`` configures."""


def configurable(program: str) -> Configurable | None:
    """Return the adapter that configures the harness that a program is, or ``None`` without one.

    Its name is the program's unless :data:`PROGRAMS` has another.
    """
    name = PROGRAMS.get(program, program)
    adapter = ADAPTERS.get(name)() if name in ADAPTERS.names() else None
    return adapter if isinstance(adapter, Configurable) else None


__all__ = [
    "ADAPTERS",
    "PROGRAMS",
    "Access",
    "Adapter",
    "Command",
    "Configurable",
    "PythonAgent",
    "configurable",
]
