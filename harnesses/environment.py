"""The environment in which a harness runs: the few variables of the caller that it may have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Final

from bridle.harnesses.permissions import SESSION_ENV, names_in

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


ALLOWED: Final = frozenset(
    {"PATH", "HOME", "LANG", "TERM", "TZ", "PYTHONPATH", "LD_LIBRARY_PATH", "NODE_PATH"}
)
"""The caller's variables that a sandbox's processes get, with ``LC_…`` and ``…_NUM_THREADS``."""


def allowed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``environment`` that a sandbox's processes get.

    They are the places of programs, the language, the time zone, the numbers of threads, and those
    that the user permits (:mod:`bridle.harnesses.permissions`). An HTTP proxy among them never
    serves loopback, where the recording proxy is.
    """
    named = names_in(SESSION_ENV, environment)
    kept = {
        name: value
        for name, value in environment.items()
        if name in ALLOWED
        or name in named
        or name.startswith("LC_")
        or name.endswith("_NUM_THREADS")
    }
    return _loopback_direct(kept)


def _loopback_direct(kept: dict[str, str]) -> dict[str, str]:
    if any(name.lower().endswith("_proxy") for name in kept):
        direct = [kept.get("no_proxy") or kept.get("NO_PROXY") or "", *_LOOPBACK]
        kept["no_proxy"] = kept["NO_PROXY"] = ",".join(host for host in direct if host)
    return kept


_OVERRIDING = frozenset(
    {
        "ANTHROPIC_API_KEY",
        "GOOGLE_API_KEY",
        "GOOGLE_GENAI_USE_VERTEXAI",
        "GOOGLE_GENAI_USE_GCA",
        "CLAUDE_CODE_OAUTH_TOKEN",
        "CLAUDE_CODE_USE_BEDROCK",
        "CLAUDE_CODE_USE_VERTEX",
        "CODEX_API_KEY",
        "OPENAI_ORG_ID",
        "OPENAI_ORGANIZATION",
        "OPENAI_PROJECT_ID",
    }
)
"""The variables that override those that point a client at the proxy, or that a client sends
along."""


def redirected(environment: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """Return a person's own ``environment`` with ``variables`` and nothing that overrides them."""
    kept = {name: value for name, value in environment.items() if name not in _OVERRIDING}
    return _loopback_direct({**kept, **variables})


def home_at(home: PurePath) -> dict[str, str]:
    """Return the variables that make ``home`` a process's home, so that sessions share no state."""
    return {
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "XDG_DATA_HOME": str(home / ".local/share"),
        "XDG_STATE_HOME": str(home / ".local/state"),
    }
