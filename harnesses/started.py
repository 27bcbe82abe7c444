"""The start of a harness, in the form that its session records."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from bridle.store.records import StartFacts

_PROVIDERS: Final = re.compile(
    r"^(OPENAI|AZURE_OPENAI|AZURE_AI|ANTHROPIC|CLAUDE|CODEX|GOOGLE|GEMINI|VERTEX|QWEN|DASHSCOPE"
    r"|BAILIAN|OPENCODE|PI_CODING|MSWEA|LITELLM|MISTRAL|GROQ|COHERE|DEEPSEEK|OPENROUTER|TOGETHER"
    r"|FIREWORKS|XAI|PERPLEXITY|CEREBRAS|AWS|LANGSMITH|LANGCHAIN|BRIDLE)_",
)
_SECRETS: Final = re.compile(r"(_|^)(API_?KEYS?|TOKEN|ACCESS_KEY|SECRET(_KEY)?)$")
_NAMED: Final = frozenset({"CLAUDECODE"})
_GIT_S: Final = 5.0
"""Seconds to wait for Git."""
_NAMES: Final = r"(?:api[_-]?key|token|secret|password|passwd)"
_ASSIGNED: Final = re.compile(rf"""(?i)({_NAMES}["']?\s*[=:]\s*["']?|\bbearer\s+)([^\s"',;)]+)""")
"""A secret beside its name, as in ``api_key="…"`` or ``--token=…``."""
_OPTION: Final = re.compile(rf"(?i)-+[\w-]*{_NAMES}")
_SHORTEST: Final = 8
"""Characters of the shortest value of a variable that is looked for in a command."""
REMOVED: Final = "[redacted]"
"""The word in the place of a secret."""


def how_started(
    argv: Sequence[str], folder: str, environment: Mapping[str, str], secrets: Sequence[str] = ()
) -> StartFacts:
    """Return the facts of a start.

    The environment gives ``HOME``, ``TZ`` and the names of its variables, but no other value. In
    ``argv`` are replaced: ``secrets``, the values of variables that are named like secrets, and
    what stands beside such a name.
    """
    secrets = [
        *secrets,
        *(v for name, v in environment.items() if _is_secret(name) and len(v) >= _SHORTEST),
    ]
    return StartFacts(
        argv=without_secrets(argv, secrets),
        folder=folder,
        home=environment.get("HOME"),
        tz=environment.get("TZ"),
        environment_names=tuple(sorted(environment)),
    )


def without_secrets(argv: Sequence[str], secrets: Sequence[str] = ()) -> tuple[str, ...]:
    """Return ``argv`` without ``secrets``, and without values that are named like secrets."""
    shown: list[str] = []
    for before, word in zip(("", *argv), argv, strict=False):
        if _OPTION.fullmatch(before):
            shown.append(REMOVED)
            continue
        for secret in filter(None, secrets):
            word = word.replace(secret, REMOVED)
        shown.append(_ASSIGNED.sub(rf"\1{REMOVED}", word))
    return tuple(shown)


def installed_version(program: str) -> str | None:
    """Return the version of the Node package that ``program`` belongs to, or ``None``."""
    for folder in Path(program).resolve().parents:
        if (file := folder / "package.json").is_file():
            try:
                version = msgspec.json.decode(file.read_bytes(), type=dict[str, object])["version"]
            except (OSError, msgspec.MsgspecError, KeyError):
                return None
            return version if isinstance(version, str) else None
    return None


def workspace_commit(folder: str) -> str | None:
    """Return the commit that is checked out in ``folder``, or ``None`` if there is none."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
            timeout=_GIT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _is_secret(name: str) -> bool:
    """Return whether a variable of this name may hold a secret or a provider's setting."""
    upper = name.upper()
    return bool(upper in _NAMED or _PROVIDERS.match(upper) or _SECRETS.search(upper))
