"""A demo whose agent cannot work says so, and asks it again in the next attempt."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from bridle.cli.program import app
from bridle.recipes.demo.course import Shop
from bridle.recipes.demo.run import Demo
from bridle.recipes.demo.settings import DemoSettings
from bridle.recipes.demo.stages import NothingRecorded

SETTINGS = dataclasses.replace(DemoSettings(), first_sessions=2, parallel=2)


@pytest.mark.sampled(0)
def test_an_agent_that_fails_in_every_session_ends_the_demo_each_time(tmp_path: Path) -> None:
    course = Shop()
    course.script = tmp_path / "agent.py"
    course.script.write_text("import nothing_of_that_name\n")
    demo = Demo(tmp_path / "demo", SETTINGS, Console(stderr=True), course)
    for _attempt in range(2):
        with pytest.raises(NothingRecorded) as ended:
            demo.run()
        assert "no session of 2 completed; the last one: agent_error" in str(ended.value)
        assert str(demo.places.sessions) in str(ended.value)


def test_a_demo_without_its_agents_packages_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridle.cli.commands.demo.find_spec", lambda _name: None)
    refused = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "demo")])
    assert refused.exit_code == 1
    assert "pip install langchain langchain-openai" in refused.stderr
    assert not (tmp_path / "demo").exists()
