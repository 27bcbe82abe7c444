"""``bridle skill`` writes a folder in the form of https://agentskills.io/specification."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from bridle.cli.commands.skill import SKILL


def test_a_skill_is_written_once_and_in_its_form(
    bridle: Callable[..., Any], tmp_path: Path
) -> None:
    place = tmp_path / ".agents/skills"
    assert bridle("skill", place).exit_code == 0
    folder = place / "bridle"
    text = (folder / "SKILL.md").read_text(encoding="utf-8")
    start, matter, body = text.split("---\n", 2)
    fields = yaml.safe_load(matter)
    assert (start, fields["name"]) == ("", folder.name)
    assert 100 < len(fields["description"]) <= 1024
    assert len(body.splitlines()) < 500
    linked = set(re.findall(r"\]\(([^)]+)\)", body))
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("*.md")}
    assert linked == written - {"SKILL.md"}

    (folder / "SKILL.md").write_text("of the user")
    refused = bridle("skill", place)
    assert (refused.exit_code, (folder / "SKILL.md").read_text()) == (1, "of the user")
    assert "--force" in refused.stderr
    assert bridle("skill", place, "--force").exit_code == 0
    assert (folder / "SKILL.md").read_bytes() == (SKILL / "SKILL.md").read_bytes()
