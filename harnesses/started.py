"""The start of a harness, in the form that its session records."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from bridle.store.records import StartFacts

_GIT_S = 5.0
"""Seconds to wait for Git."""


def how_started(
    argv: Sequence[str], folder: str, environment: Mapping[str, str], secrets: Sequence[str] = ()
) -> StartFacts:
    """Return the facts of a start.

    ``secrets`` are replaced in ``argv``. The environment gives ``HOME``, ``TZ`` and the names of
    its variables, but no other value.
    """
    shown = list(argv)
    for secret in filter(None, secrets):
        shown = [one.replace(secret, "[redacted:session_key]") for one in shown]
    return StartFacts(
        argv=tuple(shown),
        folder=folder,
        home=environment.get("HOME"),
        tz=environment.get("TZ"),
        environment_names=tuple(sorted(environment)),
    )


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
