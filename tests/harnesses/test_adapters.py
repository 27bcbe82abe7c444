"""Adapters: a session per launch, and no trace of the caller or of another session."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from bridle.harnesses.adapters import ADAPTERS, PROGRAMS, Access, Adapter, Command, PythonAgent
from bridle.harnesses.adapters.base import LaunchPlan
from bridle.harnesses.client import Session
from bridle.harnesses.sandboxes import Captured, NotLaunchable, ProcessResult, ProcessSandbox
from bridle.harnesses.sandboxes.folder import place_in
from bridle.harnesses.tasks.task import Task

TASK = Task("t", 'Do {this}; it\'s "quoted".')
URLS = {"openai": "http://p/s/x/v1", "anthropic": "http://p/s/x", "google": "http://p/s/x"}
ACCESS = Access(Session("ses_x", "the-key", URLS, {"OPENAI_API_KEY": "the-key"}), "the-model")


@pytest.fixture(autouse=True)
def everything_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executables by the names that adapters look for, and a provider key of the caller's."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for name in ("codex", "claude", "qwen", "pi", "opencode", "gemini", "mini"):
        (directory / name).write_text("#!/bin/sh\n")
        (directory / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.setenv("ANTHROPIC_API_KEY", "the-callers-own")
    monkeypatch.setenv("CODEX_HOME", "/home/caller/.codex")


def everything(plan: LaunchPlan) -> str:
    return json.dumps([plan.argv, dict(plan.environment), [*plan.files.values()]])


@pytest.mark.parametrize("name", sorted(PROGRAMS.values()))
def test_a_coding_harness_is_told_the_prompt_the_session_and_a_home_of_its_own(
    name: str, tmp_path: Path
) -> None:
    place = place_in(tmp_path / "session")

    plan = ADAPTERS.get(name)().plan(TASK, ACCESS, place)

    assert TASK.prompt in plan.argv
    assert "http://p/s/x" in everything(plan)
    assert "the-key" in everything(plan)
    assert "the-callers-own" not in everything(plan)
    assert "/home/caller" not in everything(plan)
    assert plan.environment["HOME"] == str(place.home)
    assert all(path.is_relative_to(tmp_path / "session") for path in plan.files)


@pytest.mark.parametrize("name", sorted(set(PROGRAMS.values()) - {"gemini-cli"}))
def test_a_coding_harness_asks_for_the_model_it_is_told(name: str, tmp_path: Path) -> None:
    assert "the-model" in everything(ADAPTERS.get(name)().plan(TASK, ACCESS, place_in(tmp_path)))


def test_codex_is_configured_for_responses_with_the_key_from_its_environment(
    tmp_path: Path,
) -> None:
    plan = ADAPTERS.get("codex")().plan(TASK, ACCESS, place_in(tmp_path))

    config = tomllib.loads(plan.files[tmp_path / "home/.codex/config.toml"])
    provider = config["model_providers"][config["model_provider"]]
    assert provider["base_url"] == "http://p/s/x/v1"
    assert provider["wire_api"] == "responses"
    assert plan.environment[provider["env_key"]] == "the-key"


def test_a_command_may_name_every_part_of_its_session(tmp_path: Path) -> None:
    adapter = Command(
        ("agent", "--url={openai}", "--key={key}", "{{literal}}", "{prompt}"),
        environment={"BASE": "{anthropic}", "DIR": "{workspace}"},
    )

    plan = adapter.plan(TASK, ACCESS, place_in(tmp_path))

    assert plan.argv == (
        "agent",
        "--url=http://p/s/x/v1",
        "--key=the-key",
        "{literal}",
        TASK.prompt,
    )
    assert plan.environment["BASE"] == "http://p/s/x"
    assert plan.environment["DIR"] == str(tmp_path / "workspace")


@pytest.mark.parametrize("text", ["{unknown}", "{0}", "{", "{prompt.missing}"])
def test_an_unknown_placeholder_is_named(text: str, tmp_path: Path) -> None:
    with pytest.raises(NotLaunchable, match="placeholder"):
        Command(("agent", text)).plan(TASK, ACCESS, place_in(tmp_path))


def test_a_python_agent_gets_the_prompt_last_and_the_model_in_its_environment(
    tmp_path: Path,
) -> None:
    agent = PythonAgent(Path("agent.py"), arguments=["--x"], python="python3", without_tls=True)

    plan = agent.plan(TASK, ACCESS, place_in(tmp_path))

    assert plan.argv == ("python3", str(Path("agent.py").absolute()), "--x", TASK.prompt)
    assert plan.environment["OPENAI_MODEL"] == "the-model"
    assert plan.environment["SSL_CERT_FILE"] == ""


@pytest.mark.parametrize("name", sorted(PROGRAMS.values()))
def test_a_harness_that_is_not_installed_says_how_to_install_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("bridle.harnesses.install.BIN_DIRECTORIES", ())
    monkeypatch.setattr("bridle.harnesses.install.PYTHON", tmp_path)

    with pytest.raises(NotLaunchable, match=r"is not installed; run harnesses/"):
        ADAPTERS.get(name)().plan(TASK, ACCESS, place_in(tmp_path))


@pytest.mark.parametrize(
    ("adapter", "answer"),
    [
        (Command(("x",)), "the answer"),
        (PythonAgent(Path("x.py")), "the answer"),
        (ADAPTERS.get("claude-code")(), "thinking\n\nthe answer"),
        (ADAPTERS.get("codex")(), "from the file"),
        (ADAPTERS.get("mini-swe-agent")(), "submitted"),
    ],
)
async def test_the_answer_is_what_the_harness_ended_with(
    adapter: Adapter, answer: str, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "answer.txt").write_text("from the file\n")
    (logs / "trajectory.json").write_text('{"info": {"submission": "submitted\\n"}}')
    (logs / "stdout.log").write_text("thinking\n\nthe answer \n\n")
    captured = Captured.of(logs / "stdout.log")

    finished = ProcessResult(0, 1.0, captured, captured)
    assert await adapter.answer(finished, ProcessSandbox(tmp_path)) == answer


@pytest.mark.parametrize("name", ["codex", "mini-swe-agent"])
async def test_a_harness_that_left_no_answer_gave_none(name: str, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("chatter")
    captured = Captured.of(tmp_path / "out")

    finished = ProcessResult(0, 1.0, captured, captured)
    assert await ADAPTERS.get(name)().answer(finished, ProcessSandbox(tmp_path)) == ""
