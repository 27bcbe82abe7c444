"""Parts that other distributions bring: installed beside Bridle, each runs from end to end.

Nothing of ours names them. ``benchmarks/touch.py`` counts the files that they needed changed.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bridle.bench.touch import DISTRIBUTIONS as NAMES
from bridle.bench.touch import touched

DISTRIBUTIONS = Path(__file__).parents[1] / "distributions"
Run = Callable[..., subprocess.CompletedProcess[str]]

WRITES = "import pathlib, sys; pathlib.Path('work.txt').write_text(sys.argv[1]); print('done')"
CHECKS = """
def check(delivery):
    file = delivery.workspace / "work.txt"
    return float(file.exists() and file.read_text() == delivery.task.prompt)
"""


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed every distribution of others."""
    folder = tmp_path_factory.mktemp("installed")
    sources = tmp_path_factory.mktemp("sources") / "distributions"
    shutil.copytree(DISTRIBUTIONS, sources)  # a build writes beside its source
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    named = [str(sources / name) for name in NAMES.values()]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", *offline, "--target", str(folder)]
    subprocess.run([*pip, *named], check=True, capture_output=True, text=True)
    return folder


@pytest.fixture
def run(installed: Path, tmp_path: Path) -> Run:
    """``bridle ARGUMENTS`` in an environment that has the distributions."""
    environment = os.environ | {"PYTHONPATH": str(installed), "BRIDLE_HOME": str(tmp_path / "home")}

    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "bridle", *map(str, arguments)],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )

    return call


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    file = tmp_path / "tasks.jsonl"
    lines = [{"id": name, "prompt": name, "payload": {"answer": "x"}} for name in ("one", "two")]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_an_export_of_another_distribution_writes_recorded_sessions(
    run: Run, recorded: str, store: str, tmp_path: Path
) -> None:
    file = tmp_path / "talk.md"
    done = run("export", file, "--format", "markdown", "--store", store, "--json")
    assert done.returncode == 0, done.stderr
    assert file.read_text() == (
        "# Conversations\n\n**user:** What is 2 plus 3?\n\n**assistant:** \n\n**tool:** 5\n\n"
        "**assistant:** The answer is 5.\n\n"
    )
    assert json.loads(done.stdout)["trainable_tokens"] > 0
    assert json.loads(Path(f"{file}.card.json").read_text())["format"] == "markdown"
    refused = run("export", tmp_path / "talk.csv", "--format", "markdown", "--store", store)
    assert "talk.csv is no name for markdown, which is written as .md" in refused.stderr


def test_a_format_that_nothing_has_is_refused_with_those_that_are_installed(
    run: Run, recorded: str, store: str, tmp_path: Path
) -> None:
    refused = run("export", tmp_path / "x.jsonl", "--format", "markdwon", "--store", store)
    assert refused.returncode == 2
    assert "there is no export 'markdwon': name FILE.py:NAME or one of chat" in refused.stderr
    assert "replay, markdown (an installed distribution adds one" in refused.stderr


def test_a_harness_of_another_distribution_is_rolled_out(
    run: Run, proxy_url: str, store: str, tasks: Path, tmp_path: Path
) -> None:
    asked = ["--tasks", tasks, "--verifier", "regex", "--proxy", proxy_url, "--json"]
    asked += ["--set", f"agent.directory={tmp_path / 'dirs'}"]
    asked += ["--set", "tasks.options.regex.pattern=^The answer is unknown"]
    done = run("rollout", "--agent", "parrot", "--set", "agent.options.parrot.times=2", *asked)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    answer = "The answer is unknown. The answer is unknown."
    assert [(one["answer"], one["reward"]) for one in results] == [(answer, 1.0)] * 2
    with sqlite3.connect(store) as database:
        recorded = database.execute(
            "SELECT s.harness, count(*) FROM sessions s JOIN calls c ON c.session_id = s.id "
            "GROUP BY s.id"
        ).fetchall()
    assert recorded == [("parrot", 1)] * 2
    refused = run("rollout", "--agent", "parrot", "--set", "agent.options.parrot.times=0", *asked)
    assert refused.returncode == 2
    assert "options of the harness 'parrot': Expected `int` >= 1 - at `$.times`" in refused.stderr
    refused = run("rollout", "--agent", "parrot", "--set", "agent.options.parot.times=2", *asked)
    assert "options are for 'parot', which is none of regex, local" in refused.stderr
    refused = run("rollout", "--agent", "parrot", "--set", "agent.times=2", *asked)
    assert "there is no setting 'times', but name, sandbox" in refused.stderr


def test_bridle_run_configures_a_harness_of_another_distribution(
    run: Run, installed: Path, proxy_url: str, store: str, tmp_path: Path
) -> None:
    program = tmp_path / "bin" / "parrot"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {installed}/parrot.py "$@"\n')
    program.chmod(0o755)
    done = run("run", "--proxy", proxy_url, "--", program, "hello")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The answer is unknown.\n"
    assert "calls: 1 complete" in done.stderr


def test_installed_parts_are_listed_with_their_options(run: Run) -> None:
    sets = json.loads(run("config", "--parts").stdout)
    assert "markdown" in sets["bridle.exports"]
    assert sets["bridle.adapters"]["parrot"]["options"] == {"name": "parrot", "times": 1}
    assert list(sets["bridle.sandboxes"]["remote"]["options"]) == ["url"]


@pytest.mark.parametrize(("kind", "files"), touched().items())
def test_a_part_of_another_distribution_needs_no_file_of_ours(kind: str, files: list[str]) -> None:
    assert files == []
    assert (DISTRIBUTIONS / NAMES[kind]).is_dir()


@pytest.fixture
def machine(installed: Path, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The URL of a machine for remote sandboxes, and its folder."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    argv = [sys.executable, "-m", "bridle_remote.server", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(installed)}
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{server.stdout.readline().strip()}", folder
        server.kill()


def test_a_remote_sandbox_of_another_distribution_runs_sessions_elsewhere(
    run: Run, machine: tuple[str, Path], proxy_url: str, tasks: Path, tmp_path: Path
) -> None:
    url, folder = machine
    (tmp_path / "own.py").write_text(CHECKS)
    writes = f'{sys.executable} -c "{WRITES}" {{prompt}}'
    asked = ["--agent", writes, "--tasks", tasks, "--verifier", f"{tmp_path}/own.py:check"]
    asked += ["--proxy", proxy_url, "--set", f"agent.directory={tmp_path / 'dirs'}", "--json"]
    done = run(
        "rollout",
        "--set",
        "agent.sandbox=remote",
        "--set",
        f"agent.options.remote.url={url}",
        *asked,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert [(one["outcome"], one["reward"]) for one in results] == [("completed", 1.0)] * 2
    assert list(folder.iterdir()) == [], "a session's folder goes with its sandbox"
    sleeps = [
        "--agent",
        "sh -c 'sleep 60; echo {prompt}'",
        *asked[2:],
        "--set",
        "agent.timeout_s=0.5",
    ]
    done = run(
        "rollout",
        "--set",
        "agent.sandbox=remote",
        "--set",
        f"agent.options.remote.url={url}",
        *sleeps,
    )
    assert "2 timeout: the agent ran for more than 0.5 s" in done.stderr
    nowhere = "agent.options.remote.url=http://127.0.0.1:9"
    refused = run("rollout", "--set", "agent.sandbox=remote", "--set", nowhere, *asked)
    assert "no machine answers at http://127.0.0.1:9: start one" in refused.stderr
