"""The start of a session's harness (``harnesses/started.py``)."""

import json
import subprocess

from bridle.harnesses.started import how_started, installed_version, workspace_commit


def test_values_of_the_environment_and_the_sessions_key_are_not_kept():
    environment = {"HOME": "/home/a", "TZ": "UTC", "SECRET": "value"}
    start = how_started(["agent", "--key=brk_1"], "/work", environment, secrets=("brk_1", ""))
    assert start.argv == ("agent", "--key=[redacted:session_key]")
    assert (start.home, start.tz) == ("/home/a", "UTC")
    assert start.environment_names == ("HOME", "SECRET", "TZ")
    assert "value" not in repr(start)


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
