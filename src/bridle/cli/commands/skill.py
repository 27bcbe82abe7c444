"""``bridle skill``: write the skill with which coding agents use Bridle by themselves."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Final

import typer

from bridle.cli.terminal import fail, out

SKILL: Final = Path(__file__).parents[1] / "skill"
"""The skill's files, in the form of https://agentskills.io."""
_NAME: Final = "bridle"
"""The skill's name, which its folder must have."""


def skill(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help=".claude/skills, .agents/skills (Codex and others), or another."
        ),
    ],
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    """Write a skill for coding agents, to use Bridle by themselves."""
    target = folder / _NAME
    if target.exists() and not force:
        fail(f"{target} is there already: --force overwrites its files")
    shutil.copytree(SKILL, target, dirs_exist_ok=True)
    out.print(f"wrote {target}")
