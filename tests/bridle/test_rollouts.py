"""Rollouts from synchronous code, also from a thread that collects ahead of a trainer."""

from __future__ import annotations

import json
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from bridle.engine.scripted import ScriptedEngine
from bridle.harnesses.adapters.command import Command
from bridle.harnesses.fleet import LocalFleet
from bridle.harnesses.rollout import Job, RolloutSettings
from bridle.harnesses.sandboxes.process import ProcessProvider
from bridle.harnesses.sandboxes.walls import missing
from bridle.harnesses.tasks.task import Task
from bridle.harnesses.verifiers import ExactAnswer
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.run.groups import GroupPlan
from bridle.run.rollouts import Rollouts
from bridle.store.reading.queries import Reader
from support.processes import until

pytestmark = [pytest.mark.loop, pytest.mark.usefixtures("warm_start")]

Bridle = Callable[..., Result]

PLAIN = "def check(delivery):\n    return float(delivery.answer == delivery.task.prompt)\n"


@pytest.fixture
def rollout(bridle: Bridle, proxy_url: str, tmp_path: Path) -> Bridle:
    """``bridle rollout`` of a command on two tasks, with a verifier whose source is given."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"id": "t1", "prompt": "one"}\n{"id": "t2", "prompt": "two"}\n')
    own = tmp_path / "own.py"

    def call(verifier: str, *more: object, agent: str = "echo {prompt}") -> Result:
        own.write_text(verifier)
        asked = ["--proxy", proxy_url, "--tasks", tasks]
        asked += ["--set", f"agent.directory={tmp_path / 'sessions'}"]
        return bridle("rollout", "--agent", agent, "--verifier", f"{own}:check", *asked, *more)

    return call


@pytest.mark.parametrize("verifier", [PLAIN, f"async {PLAIN}"])
def test_a_verifier_is_any_function_of_a_file(rollout: Bridle, verifier: str) -> None:
    done = rollout(verifier, "--json")
    assert done.exit_code == 0, done.output
    results = json.loads(done.stdout)
    assert [result["scores"] for result in results] == [{"reward": 1.0}] * 2


def test_a_verifier_that_raises_costs_its_session_and_not_the_rollout(
    rollout: Bridle, store: str
) -> None:
    raises = 'def check(delivery):\n    return 1 / (delivery.task.id != "t1")\n'
    done = rollout(raises)
    assert done.exit_code == 0, done.output
    assert "1 completed, 1 infrastructure" in done.stdout
    with sqlite3.connect(store) as database:
        sealed = database.execute("SELECT outcome FROM sessions WHERE task_id = 't1'").fetchall()
    assert sealed == [("infrastructure",)] * 2


@pytest.mark.parametrize(
    ("costs", "why"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended with signal 11 before its verdict"),
        ("os._exit(0)", "ended with exit code 0 before its verdict"),
        ("bytes(512 << 20)", "more than 256 MiB (agent.bounds.memory_mb)"),
        ("time.sleep(60)", "more than 5 s (agent.bounds.verifier_s)"),
    ],
)
def test_a_verifier_that_ends_or_exceeds_a_bound_costs_its_session_and_not_the_rollout(
    rollout: Bridle, store: str, costs: str, why: str
) -> None:
    source = "import os, signal, time\ndef check(delivery):\n    if delivery.task.id == 't1':\n"
    bounds = ("--set", "agent.bounds.verifier_s=5", "--set", "agent.bounds.memory_mb=256")
    done = rollout(f"{source}        {costs}\n    return 1.0\n", *bounds)
    assert done.exit_code == 0, done.output
    assert "1 completed" in done.stdout
    assert why in done.stderr
    with sqlite3.connect(store) as database:
        sealed = database.execute("SELECT task_id, outcome FROM sessions").fetchall()
    assert sorted(sealed) == [("t1", "infrastructure"), ("t2", "completed")]


@pytest.mark.parametrize("command", ["rollout", "train", "services"])
def test_a_tasks_function_that_raises_is_said_in_a_line(
    bridle: Bridle, tmp_path: Path, store: str, command: str
) -> None:
    own = tmp_path / "own.py"
    own.write_text("def tasks():\n    yield {}['id']\n")
    asked = ["--agent", "echo {prompt}", "--verifier", "exact", "--tasks", f"{own}:tasks"]
    where = ["rollout", "--proxy", "http://127.0.0.1:9"]
    if command != "rollout":
        where = ["train", "--policy", str(tmp_path), "--out", str(tmp_path / "out")]
    if command == "services":
        where += ["--engine-url", "http://127.0.0.1:9", "--set", f"services.store={store}"]
    refused = bridle(*where, *asked)
    said = f"bridle: cannot get tasks from {own}:tasks: KeyError: 'id' ({own}, line 2)\n"
    assert (refused.exit_code, refused.stderr) == (2, said)


def test_a_verifier_that_cannot_be_imported_is_said_in_a_line(
    rollout: Bridle, tmp_path: Path
) -> None:
    refused = rollout(f"{PLAIN}LIMIT = int('many')\n")
    own = tmp_path / "own.py"
    why = "ValueError: invalid literal for int() with base 10: 'many'"
    assert refused.exit_code == 2
    assert refused.stderr == f"bridle: cannot import {own}: {why} ({own}, line 3)\n"


@pytest.mark.parametrize(
    ("agent", "timeout", "reason"),
    [
        ("sh -c 'exit 3' {prompt}", 60, "2 agent_error: the agent exited with 3"),
        ("sh -c 'sleep 60' {prompt}", 0.5, "2 timeout: the agent ran for more than 0.5 s"),
    ],
)
def test_a_rollout_of_which_nothing_completed_fails_and_says_why_once(
    rollout: Bridle, agent: str, timeout: float, reason: str
) -> None:
    done = rollout(PLAIN, "--set", f"agent.timeout_s={timeout}", agent=agent)
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-2:] == [reason, "bridle: no session completed"]
    assert (
        rollout(PLAIN, "--set", f"agent.timeout_s={timeout}", "--json", agent=agent).exit_code == 1
    )


@pytest.mark.skipif(missing() is not None, reason=f"no namespaces: {missing()}")
def test_a_rollout_names_the_bound_that_a_session_exceeded(rollout: Bridle) -> None:
    bound = "--set=agent.bounds.processes=1"
    done = rollout(PLAIN, bound, agent="sh -c 'sleep 60 & sleep 60' {prompt}")
    ended = r"the sandbox ended the agent: \d processes, and at most 1 are permitted"
    assert re.search(rf"^\d agent_error: {ended} \(agent\.bounds\)$", done.stderr, re.MULTILINE)


def test_a_command_that_is_not_there_is_said_and_opens_no_session(
    rollout: Bridle, store: str
) -> None:
    refused = rollout(PLAIN, agent="no-such-program {prompt}")
    said = "bridle: cannot start no-such-program: there is no such command\n"
    assert (refused.exit_code, refused.stderr) == (2, said)
    with Reader(store) as reader:
        assert not list(reader.sessions())


def test_a_task_that_its_verifier_cannot_judge_is_run_once_and_the_reason_said_once(
    rollout: Bridle, store: str
) -> None:
    done = rollout("from bridle.harnesses.verifiers import ExactAnswer\ncheck = ExactAnswer()\n")
    assert done.exit_code == 1
    assert "2 infrastructure: the task has no 'answer' in its payload" in done.stderr
    with sqlite3.connect(store) as database:
        assert database.execute("SELECT count(*) FROM sessions").fetchone() == (2,)


CALLS = """
import openai, sys
messages = [{"role": "user", "content": sys.argv[1]}]
openai.OpenAI().chat.completions.create(model="policy", messages=messages)
"""


def test_an_agent_that_calls_nothing_is_told_of_the_variables_once(
    rollout: Bridle, tmp_path: Path
) -> None:
    silent = rollout(PLAIN)
    assert silent.exit_code == 0
    assert silent.stderr.count("no session has a call (does the program read OPENAI_BASE") == 1
    (tmp_path / "calls.py").write_text(CALLS)
    calling = rollout(PLAIN, agent=f"{sys.executable} {tmp_path}/calls.py {{prompt}}")
    assert calling.exit_code == 0, calling.output
    assert "no session has a call" not in calling.stderr


def test_a_rollout_without_a_task_is_refused(rollout: Bridle) -> None:
    refused = rollout(PLAIN, "--set", "tasks.split=nope")
    assert refused.exit_code == 2
    assert refused.stderr.count("\n") == 1
    assert "tasks.jsonl gives no task of split 'nope'" in refused.stderr


def test_a_group_that_runs_at_the_end_is_cancelled_and_sealed(
    proxy_url: str, store: str, tmp_path: Path
) -> None:
    prompts = ("echo", "exec sleep 60")
    jobs = [Job(Task("t", prompt, payload={"answer": "x"})) for prompt in prompts]
    settings = RolloutSettings(directory=tmp_path / "sessions")
    began = time.monotonic()
    with Rollouts(proxy_url, LocalFleet(ProcessProvider(), ExactAnswer())) as rollouts:

        def plan(number: int) -> GroupPlan:
            return GroupPlan((), tuple(jobs[number : number + 1]))

        adapter = Command(("sh", "-c", "{prompt}"))
        start = rollouts.groups(adapter, plan, settings)
        assert len(start(0, lambda: None, print).result()) == 1
        start(1, lambda: None, print)
        with Reader(store) as reader:
            while len(list(reader.sessions())) < 2:
                time.sleep(0.05)
    assert time.monotonic() - began < 30
    with Reader(store) as reader:
        assert [session.outcome for session in reader.sessions()] == ["completed", "cancelled"]


@pytest.mark.parametrize(
    ("error", "status"), [(KeyError, "failed"), (KeyboardInterrupt, "stopped")]
)
def test_a_rollouts_run_says_how_it_ended(
    proxy_url: str, store: str, error: type[BaseException], status: str
) -> None:
    with Rollouts(proxy_url, LocalFleet(ProcessProvider(), ExactAnswer())) as rollouts:
        with rollouts.run("whole"):
            pass
        with pytest.raises(error), rollouts.run("broken"):
            raise error
        with rollouts.run("measured", "eval"):
            pass
    with Reader(store) as reader:
        ended = {run.name: (run.status, run.reason) for run in reader.runs("rollout")}
        (measured,) = reader.runs("eval")
    assert measured.status == "completed"
    reason = "interrupted" if status == "stopped" else "KeyError"
    assert ended == {"whole": ("completed", None), "broken": (status, reason)}


def test_results_are_not_lost_when_the_proxy_is_gone_at_the_end(
    model_dir: Path, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = LocalFleet(ProcessProvider(), ExactAnswer())
    with ScriptedEngine(model_dir, lambda _: "Yes.", served_model_name="policy") as engine:
        proxy = ProxyServer(ProxySettings(engine.base_url, f"sqlite:///{store}"))
        with proxy, Rollouts(proxy.base_url, fleet) as rollouts, rollouts.run("cut off") as run:
            proxy.stop()
    assert f"how run {run} ended is not recorded: no answer from" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_rollout_that_is_ended_leaves_no_open_session(
    proxy_url: str, tmp_path: Path, store: str, number: signal.Signals
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"id": "t1", "prompt": "one", "payload": {"answer": "1"}}\n')
    argv = [sys.executable, "-m", "bridle", "rollout", "--agent", "sh -c 'sleep 60' {prompt}"]
    argv += ["--verifier", "exact", "--tasks", str(tasks), "--proxy", proxy_url]
    with (
        Reader(store) as reader,
        subprocess.Popen([*argv, "--set", f"agent.directory={tmp_path / 'sessions'}"]) as process,
    ):
        until(lambda: list(reader.sessions()))
        process.send_signal(number)
        assert process.wait(20) == 130
        assert [session.outcome for session in reader.sessions()] == ["cancelled"]


def test_a_fleet_that_is_none_is_said_in_a_line(rollout: Bridle) -> None:
    refused = rollout(PLAIN, "--set", "agent.fleet=slurm")
    said = "bridle: there is no fleet 'slurm': name FILE.py:NAME or one of local, ray"
    assert (refused.exit_code, refused.stderr[: len(said)]) == (2, said)


STAGED = """
from pathlib import Path
from bridle import Task
from bridle.harnesses.tasks.task import Step
from bridle.harnesses.verifiers import CommandVerifier

def tasks():
    folder = Path(__file__).with_name("setup")
    for number in range(24):
        yield Task(str(number), "p", steps=(Step("one", "p", setup=str(folder)),))

check = CommandVerifier("sleep 1")
"""


@pytest.mark.sampled(0)
def test_stages_of_equal_length_overlap_and_the_command_says_what_bounds(
    bridle: Bridle, proxy_url: str, store: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(STAGED)
    (tmp_path / "setup").mkdir()
    (tmp_path / "setup" / "setup.sh").write_text("sleep 1")
    asked = [
        "--proxy",
        proxy_url,
        "--set",
        f"agent.directory={tmp_path / 'sessions'}",
        "--parallel",
        1,
    ]
    asked += ["--tasks", f"{tmp_path}/own.py:tasks", "--verifier", f"{tmp_path}/own.py:check"]
    done = bridle("rollout", "--agent", "sh -c 'sleep 1' {prompt}", *asked)
    assert done.exit_code == 0, done.output
    (line,) = [line for line in done.stderr.splitlines() if "sessions/h" in line]
    assert "bounded by" in line
    assert float(re.findall(r"([\d.]+) times one stage at a time", line)[0]) >= 2.5, line
    with sqlite3.connect(store) as database:
        stages = "SELECT json_extract(labels, '$.seconds.' || ?) FROM sessions"
        for name in ("prepare", "run", "verify"):
            assert all(seconds >= 1 for (seconds,) in database.execute(stages, (name,)))
