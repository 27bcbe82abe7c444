"""Identification of the calling harness, and of its own session, by a request's headers.

The headers that each harness sends are observed, not documented (versions in docs/harnesses.md).
Headers that identify are kept with the call; everything else about the client is discarded.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final, NamedTuple

KEPT_HEADERS: Final = frozenset(
    {
        "session-id",
        "thread-id",
        "x-codex-turn-metadata",
        "x-claude-code-session-id",
        "x-claude-code-agent-id",
        "x-session-id",
        "x-parent-session-id",
        "x-stainless-retry-count",
        "user-agent",
        "traceparent",
    }
)
"""Headers recorded with each call: evidence of the harness, its sessions, sub-agents, retries and
trace."""
_LONGEST_VALUE: Final = 4096

_SESSION_HEADERS: Final = (
    ("x-claude-code-session-id", "claude-code"),
    ("x-session-id", None),
    ("session-id", None),
)
"""Headers that name the harness's own session, and the harness where no other one sends them.

OpenCode and Codex, who send the last two, name themselves in ``user-agent``.
"""
_USER_AGENTS: Final = (
    ("codex", "codex"),
    ("claude-cli", "claude-code"),
    ("qwencode", "qwen-code"),
    ("geminicli", "gemini-cli"),
    ("opencode", "opencode"),
    ("pi-coding-agent", "pi"),
    ("litellm", "litellm"),
    ("langchain", "langchain"),
    ("openai/python", "openai-python"),
    ("asyncopenai/python", "openai-python"),
    ("anthropic/python", "anthropic-python"),
    ("openai/js", "openai-js"),
)


_LIBRARIES: Final = (None, "anthropic-python", "openai-js", "openai-python")
"""The names of a client that does not say which harness it works for."""


class Identity(NamedTuple):
    """The harness and its session, as the headers show them."""

    harness: str | None
    session_name: str | None
    """The harness's own session id, prefixed by the harness, or by ``client`` if that is not known;
    ``None`` if it sends none."""
    role: str | None
    """The sub-agent or thread within that session, if the harness sends one."""


def identify(headers: Mapping[str, str]) -> Identity:
    harness = _by_user_agent(headers.get("user-agent", ""))
    role = headers.get("x-claude-code-agent-id")
    if not role:
        thread = headers.get("thread-id")
        role = thread if thread and thread != headers.get("session-id") else None
    for header, sender in _SESSION_HEADERS:
        value = headers.get(header)
        if value:
            harness = sender if sender and harness in _LIBRARIES else harness
            return Identity(harness, f"{harness or 'client'}-{value[:128]}", role)
    return Identity(harness, None, role)


def kept_headers(headers: Mapping[str, str]) -> dict[str, str]:
    kept: dict[str, str] = {}
    for name, value in headers.items():
        if name in KEPT_HEADERS:
            kept[name] = value[:_LONGEST_VALUE]
    return kept


@lru_cache(maxsize=1024)
def _by_user_agent(user_agent: str) -> str | None:
    lowered = user_agent.lower()
    return next((harness for mark, harness in _USER_AGENTS if mark in lowered), None)
