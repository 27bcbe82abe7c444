"""The start of a session's harness (``harnesses/started.py``)."""

import json
import subprocess

import pytest

from bridle.harnesses.started import how_started, installed_version, workspace_commit


def test_values_of_the_environment_and_the_sessions_key_are_not_kept():
    environment = {"HOME": "/home/a", "TZ": "UTC", "SECRET": "value"}
    start = how_started(["agent", "--key=brk_1"], "/work", environment, secrets=("brk_1", ""))
    assert start.argv == ("agent", "--key=[redacted]")
    assert (start.home, start.tz) == ("/home/a", "UTC")
    assert start.environment_names == ("HOME", "SECRET", "TZ")
    assert "value" not in repr(start)


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        ("a --api-key sk-own x", "a --api-key [redacted] x"),
        ("a --token=t0p", "a --token=[redacted]"),
        ('python Client(api_key="sk-own")', 'python Client(api_key="[redacted]")'),
        ("a the-variables-value", "a the-[redacted]"),
        ("a --max-tokens 20 max_tokens=20", "a --max-tokens 20 max_tokens=20"),
    ],
)
def test_a_secret_in_a_command_is_not_kept(argv: str, shown: str) -> None:
    variables = {"MY_API_KEY": "variables-value", "SHORT_KEY": "max"}
    assert " ".join(how_started(argv.split(), "/work", variables).argv) == shown


def test_a_bearer_token_in_a_command_is_not_kept() -> None:
    start = how_started(["curl", "-H", "Authorization: Bearer abc"], "/work", {})
    assert start.argv[-1] == "Authorization: Bearer [redacted]"


def test_the_version_is_that_of_the_programs_package(tmp_path):
    program = tmp_path / "package" / "bin" / "agent.js"
    program.parent.mkdir(parents=True)
    program.touch()
    assert installed_version(str(program)) is None
    for content, version in (('{"version": "1.2.3"}', "1.2.3"), ("{}", None), ("[", None)):
        (tmp_path / "package" / "package.json").write_text(content)
        assert installed_version(str(program)) == version
    (tmp_path / "package" / "package.json").write_text(json.dumps({"version": 3}))
    assert installed_version(str(program)) is None


def test_the_commit_is_that_of_the_folder(tmp_path):
    assert workspace_commit(str(tmp_path)) is None
    assert workspace_commit(str(tmp_path / "none")) is None
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "a"], cwd=tmp_path, check=True)
    found = workspace_commit(str(tmp_path))
    assert found is not None
    assert len(found) == 40
