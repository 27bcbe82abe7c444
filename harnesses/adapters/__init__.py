"""The adapters: how each harness is launched on a task, connected to a session, and asked for its
answer."""

from bridle.harnesses.adapters.base import Access, Adapter, Configurable
from bridle.harnesses.adapters.claude_code import ClaudeCode
from bridle.harnesses.adapters.codex import Codex
from bridle.harnesses.adapters.command import Command
from bridle.harnesses.adapters.gemini_cli import GeminiCli
from bridle.harnesses.adapters.mini_swe_agent import MiniSweAgent
from bridle.harnesses.adapters.opencode import OpenCode
from bridle.harnesses.adapters.pi import Pi
from bridle.harnesses.adapters.python_agent import PythonAgent
from bridle.harnesses.adapters.qwen_code import QwenCode

CODING_HARNESSES: dict[str, type[Adapter]] = {
    "codex": Codex,
    "claude-code": ClaudeCode,
    "qwen-code": QwenCode,
    "pi": Pi,
    "opencode": OpenCode,
    "gemini-cli": GeminiCli,
    "mini-swe-agent": MiniSweAgent,
}
"""The adapters that need no argument, by their name on a command line."""

PROGRAMS: dict[str, Configurable] = {
    "codex": Codex(),
    "claude": ClaudeCode(),
    "qwen": QwenCode(),
    "pi": Pi(),
    "opencode": OpenCode(),
    "gemini": GeminiCli(),
    "mini": MiniSweAgent(),
}
"""The harnesses that ``bridle run`` configures, by the name of their program."""

__all__ = [
    "CODING_HARNESSES",
    "PROGRAMS",
    "Access",
    "Adapter",
    "ClaudeCode",
    "Codex",
    "Command",
    "Configurable",
    "GeminiCli",
    "MiniSweAgent",
    "OpenCode",
    "Pi",
    "PythonAgent",
    "QwenCode",
]
