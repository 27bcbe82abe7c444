"""``bridle worker`` runs what a trainer elsewhere asks for, and nothing that it goes away from."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import Result

from bridle.run.environment import is_base_url
from bridle.run.remote import RemoteWorkers, WorkerFailed
from bridle.run.services import Service
from bridle.store.reading.queries import Reader
from bridle.store.records import RunRecord
from bridle.store.writing.writer import Writer

AGENT = """
import json, os, sys, time, urllib.request
time.sleep(float(sys.argv[2]))
body = {"model": "policy", "messages": [{"role": "user", "content": sys.argv[1]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    path = tmp_path / "agent.py"
    path.write_text(AGENT)
    return path


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    lines = [{"id": f"t{n}", "prompt": f"Question {n}?", "payload": {}} for n in range(6)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def run_id(store: str) -> str:
    with Writer(store) as writer:
        writer.add_sync(RunRecord("run-1", "train", time.time()))
    return "run-1"


def worker(
    proxy_url: str,
    agent: Path,
    tasks: Path,
    directory: Path,
    *more: str,
    wait: float = 0,
    key: str | None = None,
) -> Service:
    command = f"{sys.executable} {agent} {{prompt}} {wait}"
    verifier = directory / "verifier.py"
    verifier.write_text(
        "async def check(delivery):\n    return {'reward': float('unknown' in delivery.answer)}\n"
    )
    arguments = ["worker", "--agent", command, "--tasks", str(tasks), "--proxy", proxy_url]
    arguments += ["--verifier", f"{verifier}:check", "--port", "0"]
    arguments += ["--directory", str(directory / "work"), *more]
    return Service(arguments, directory / "worker.log", {"BRIDLE_ADMIN_KEY": key})


@pytest.fixture
def serving(proxy_url: str, agent: Path, tasks: Path, tmp_path: Path) -> Iterator[Service]:
    with worker(proxy_url, agent, tasks, tmp_path) as service:
        yield service


def test_a_round_is_run_rewarded_sealed_and_recorded_under_the_trainers_run(
    serving: Service, store: str, run_id: str
) -> None:
    heard: list[object] = []
    with RemoteWorkers(
        [serving.url], run_id=run_id, group_size=3, on_session=heard.append
    ) as remote:
        first, second = sessions(remote, 0, 1), sessions(remote, 2, 3)
    assert len(first) == len(second) == 6
    assert len(heard) == 12
    with Reader(store) as reader:
        found = {session.id: session for session in reader.sessions(run=run_id)}
        assert set(found) == {*first, *second}
        assert {session.outcome for session in found.values()} == {"completed"}
        groups = {(found[each].group_id, found[each].task_id) for each in first}
        others = {found[each].task_id for each in second}
        assert len(groups) == 2, "three sessions each of two tasks"
        assert not others & {task for _, task in groups}, "the tasks are taken in turn"
        assert [reward.value for reward in reader.rewards(first[0])] == [1.0]
        assert reader.call_counts(first[0])


def test_workers_share_the_groups_of_a_step(
    serving: Service,
    proxy_url: str,
    agent: Path,
    tasks: Path,
    tmp_path: Path,
    store: str,
    run_id: str,
) -> None:
    (tmp_path / "other").mkdir()
    with worker(proxy_url, agent, tasks, tmp_path / "other") as other:
        urls = [serving.url, other.url]
        with RemoteWorkers(urls, run_id=run_id, group_size=1) as remote:
            found = sessions(remote, 3, 4, 5)
    with Reader(store) as reader:
        assert len({reader.session(each).task_id for each in found}) == 3


def test_a_trainer_that_goes_away_ends_its_round(
    proxy_url: str, agent: Path, tasks: Path, tmp_path: Path, store: str, run_id: str
) -> None:
    with worker(proxy_url, agent, tasks, tmp_path, wait=60) as serving:
        body = {"run_id": run_id, "first": 0, "groups": 1, "group_size": 2}
        with httpx.stream("POST", f"{serving.url}/rounds", json=body, trust_env=False) as reply:
            assert reply.status_code == 200
            with Reader(store) as reader:
                until(lambda: len(list(reader.sessions(run=run_id))) == 2)
        with Reader(store) as reader:
            until(lambda: all(each.outcome for each in reader.sessions(run=run_id)))
            assert {each.outcome for each in reader.sessions(run=run_id)} == {"cancelled"}


def test_a_worker_that_dies_in_a_round_is_told_from_one_that_is_done(
    proxy_url: str, agent: Path, tasks: Path, tmp_path: Path, store: str, run_id: str
) -> None:
    with (
        worker(proxy_url, agent, tasks, tmp_path, wait=60) as serving,
        RemoteWorkers([serving.url], run_id=run_id, group_size=1) as remote,
    ):
        asked = remote(0, lambda: None)
        with Reader(store) as reader:
            until(lambda: len(list(reader.sessions(run=run_id))) == 1)
        os.kill(serving.pid, signal.SIGKILL)
        with pytest.raises(WorkerFailed, match=re.escape(serving.url)):
            asked.result(20)


INTERRUPTED = """
import sys
from bridle.run.remote import RemoteWorkers

with RemoteWorkers([sys.argv[1]], run_id="run-1", group_size=1) as remote:
    remote(0, lambda: None).result()
"""


def test_ctrl_c_ends_a_trainer_and_its_round(
    proxy_url: str, agent: Path, tasks: Path, tmp_path: Path, store: str, run_id: str
) -> None:
    with worker(proxy_url, agent, tasks, tmp_path, wait=60) as serving, Reader(store) as reader:
        argv = [sys.executable, "-c", INTERRUPTED, serving.url]
        with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as process:
            until(lambda: len(list(reader.sessions(run=run_id))) == 1)
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            finally:
                process.kill()
        until(lambda: [each.outcome for each in reader.sessions(run=run_id)] == ["cancelled"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_told_to_end_it_leaves_no_agent_and_no_open_session(
    proxy_url: str,
    agent: Path,
    tasks: Path,
    tmp_path: Path,
    store: str,
    run_id: str,
    number: signal.Signals,
) -> None:
    with worker(proxy_url, agent, tasks, tmp_path, wait=60) as serving:
        body = {"run_id": run_id, "first": 0, "groups": 1, "group_size": 1}
        with httpx.stream("POST", f"{serving.url}/rounds", json=body, trust_env=False):
            with Reader(store) as reader:
                until(lambda: len(list(reader.sessions(run=run_id))) == 1)
            os.kill(serving.pid, number)
            with Reader(store) as reader:
                until(lambda: all(each.outcome for each in reader.sessions(run=run_id)))
                assert {each.outcome for each in reader.sessions(run=run_id)} == {"cancelled"}


def test_what_it_cannot_serve_is_said_before_it_listens(
    bridle: Callable[..., Result],
) -> None:
    command = ["worker", "--agent", "echo {prompt}", "--proxy", "http://127.0.0.1:9"]
    for verifier, tasks, why in (
        ("nothing.py:check", "tasks.jsonl", "module nothing.py does not exist"),
        ("exact", "nothing.jsonl", "task file nothing.jsonl does not exist"),
    ):
        refused = bridle(*command, "--verifier", verifier, "--tasks", tasks)
        assert (refused.exit_code, refused.stderr) == (2, f"bridle: {why}\n")


def test_its_url_on_an_ipv6_address_is_one(
    proxy_url: str, agent: Path, tasks: Path, tmp_path: Path
) -> None:
    with worker(proxy_url, agent, tasks, tmp_path, "--host", "::1") as serving:
        assert is_base_url(serving.url)
        assert httpx.get(f"{serving.url}/healthz", trust_env=False).is_success


def test_what_is_no_round_is_refused(serving: Service) -> None:
    for body in ({}, {"run_id": "r", "first": 0, "groups": 1, "group_size": 1, "argv": ["sh"]}):
        reply = httpx.post(f"{serving.url}/rounds", json=body, trust_env=False)
        assert reply.status_code == 422


def test_with_a_key_only_those_who_send_it_are_served(
    proxy_url: str, agent: Path, tasks: Path, tmp_path: Path
) -> None:
    with worker(proxy_url, agent, tasks, tmp_path, key="the-key") as serving:
        with (
            RemoteWorkers([serving.url], run_id="r", group_size=1, key="another") as remote,
            pytest.raises(WorkerFailed, match="401"),
        ):
            remote(0, lambda: None).result()
        assert httpx.get(f"{serving.url}/healthz", trust_env=False).is_success


def sessions(remote: RemoteWorkers, *groups: int) -> list[str]:
    asked = [remote(number, lambda: None) for number in groups]
    return [session for group in asked for session in group.result()]


def until(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)
