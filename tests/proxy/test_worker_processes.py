"""Several worker processes behind one port: any continues any session, all agree on the policy."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from bridle.engine.scripted import ScriptedCall, ScriptedEngine, ScriptedReply, Stall
from bridle.reconstruct.audit import audit
from bridle.reconstruct.episodes import episode_of
from bridle.reconstruct.session import LoadedSession
from bridle.store.reading.queries import Reader
from support.processes import until

pytestmark = pytest.mark.loop

CHAT = "/v1/chat/completions"
KEY = "the-operators-key"
ADMIN = {"authorization": f"Bearer {KEY}"}
CALL = ScriptedCall("add", '{"a":1,  "b":2}')
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@dataclass
class Workers:
    """A proxy of several processes."""

    url: str
    process: subprocess.Popen[str]

    def pids(self) -> list[int]:
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [one for one in map(int, children) if b"spawn_main" in cmdline(one)]

    def metrics(self) -> tuple[int, str]:
        """The process id and the metrics of the worker that takes the request."""
        text = httpx.get(self.url + "/metrics", headers=ADMIN, timeout=60, trust_env=False).text
        (pid,) = set(re.findall(r'worker="(\d+)"', text))
        return int(pid), text

    def of_each(self) -> dict[int, str]:
        """The metrics of each worker that has started, by process id."""
        return dict(self.metrics() for _ in range(16))

    def served(self) -> dict[int, float]:
        """Recorded calls by worker."""
        pattern = r"bridle_calls_total\{.*\} (\S+)"
        found = {pid: re.findall(pattern, text) for pid, text in self.of_each().items()}
        return {pid: sum(map(float, counts)) for pid, counts in found.items()}

    def up(self) -> set[int]:
        """The process ids of the workers that have started."""
        return set(self.of_each())


def control_of(url: str) -> httpx.Client:
    base = f"{url}/bridle/v1"
    return httpx.Client(base_url=base, headers=ADMIN, timeout=60, trust_env=False)


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


Start = Callable[..., Any]


@pytest.fixture
def start(stage: Any, model_dir: Path, tmp_path: Path) -> Start:
    @contextmanager
    def run(*options: str) -> Iterator[Workers]:
        command = [sys.executable, "-m", "bridle", "proxy", "--engine", stage.engine.base_url]
        command += ["--store", str(tmp_path / "bridle.db"), "--tokenizer", str(model_dir)]
        command += ["--port", "0", "--workers", "2", "--json", *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "BRIDLE_ADMIN_KEY": KEY}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        try:
            assert process.stdout is not None
            workers = Workers(json.loads(process.stdout.readline())["url"], process)
            until(lambda: len(workers.up()) >= 2, 120)
            yield workers
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise

    return run


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """While the process takes no connection."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def ask(url: str, session: str, messages: list[Any], **fields: Any) -> httpx.Response:
    """Ask on a connection of its own, so that any worker that runs may take it."""
    body = {"model": "m", "messages": messages, "tools": TOOLS, **fields}
    with httpx.Client(timeout=60, trust_env=False, verify=False) as client:  # noqa: S501
        return client.post(f"{url}/s/{session}{CHAT}", json=body, headers=ADMIN)


def test_a_session_whose_turns_land_on_both_workers_is_one_exact_line(
    stage: Any, start: Start, tmp_path: Path
) -> None:
    stage.play = lambda request: ScriptedReply(
        f"Step {len(request.messages)}.", tool_calls=(CALL, CALL)
    )
    messages: list[Any] = [{"role": "user", "content": "one?"}]
    with start() as workers:
        for turn in range(6):
            with stopped(workers.pids()[turn % 2]):
                reply = ask(workers.url, "lamp", messages)
            message = reply.json()["choices"][0]["message"]
            messages.append(message)
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": "3"}
                for call in message["tool_calls"]
            ]
        assert sorted(workers.served().values()) == [3, 3]
    with Reader(str(tmp_path / "bridle.db")) as reader:
        session = reader.session_by_name("lamp")
        assert session is not None
        calls = reader.calls(session.id)
        assert [call.parent_call_id for call in calls[1:]] == [call.id for call in calls[:-1]]
        assert {call.break_reason for call in calls} == {None}
        assert len({call.writer_id for call in calls}) == 2
        (sample,) = episode_of(LoadedSession.load(reader, session.id)).samples
        assert int(sample.mask.sum()) == sum(call.sampled_tokens or 0 for call in calls)
        assert not [v for found in audit(reader, bodies=True) for v in found.violations]


def test_every_worker_leaves_out_an_engine_that_has_changed(
    stage: Any, start: Start, tmp_path: Path, until: Any
) -> None:
    hello = [{"role": "user", "content": "hi"}]
    with start() as workers:
        control = control_of(workers.url)
        control.put("/policy", json={"version": 2}).raise_for_status()
        stage.engine.backend.weights_fingerprint = str(tmp_path)
        changes = r"bridle_engine_changes_total\{.*\} (\S+)"
        until(
            lambda: (
                [re.findall(changes, text) for text in workers.of_each().values()]
                == [["1.0"], ["1.0"]]
            )
        )
        for number in range(2):
            with stopped(workers.pids()[number]):
                assert ask(workers.url, f"s{number}", hello).status_code == 503
        control.put("/policy", json={"version": 3}).raise_for_status()
        for number in range(2):
            with stopped(workers.pids()[number]):
                assert ask(workers.url, f"t{number}", hello).status_code == 200
        assert len(stage.requests) == 2


def test_all_workers_agree_on_policy_pause_and_seal_and_a_restart_forgets_nothing(
    stage: Any, start: Start, tmp_path: Path, until: Any
) -> None:
    hello = [{"role": "user", "content": "hi"}]
    with start() as workers:
        control = control_of(workers.url)
        assert control.put("/policy", json={"version": 7}).json()["version"] == 7
        for number in range(8):
            assert ask(workers.url, f"s{number}", hello).status_code == 200

        # A sealed session is closed in every worker, also in those that know it as open.
        made = control.get("/sessions").json()[0]["id"]
        control.post(f"/sessions/{made}/seal", json={})
        assert {ask(workers.url, made, hello).status_code for _ in range(8)} == {403}

        # A pause holds everywhere, also in a worker that is started while it lasts.
        stage.play = lambda _: ScriptedReply("The answer is four.", fault=Stall(8, after_tokens=1))
        running = [
            threading.Thread(target=ask, args=(workers.url, f"p{n}", hello)) for n in range(2)
        ]
        for thread in running:
            thread.start()
        until(lambda: control.get("/policy").json()["running"] == 2)
        state = control.post("/pause", json={"mode": "drain", "timeout_s": 30}).json()
        assert (state["paused"], state["running"]) == (True, 0)
        for thread in running:
            thread.join()
        stage.play = lambda _: ScriptedReply("The answer is four.")
        asked = len(stage.requests)
        before = workers.pids()
        os.kill(before[0], signal.SIGKILL)
        until(lambda: len(set(workers.pids()) - {before[0]}) == 2)
        until(lambda: workers.up() == set(workers.pids()))
        waiting = [
            threading.Thread(target=ask, args=(workers.url, f"w{n}", hello)) for n in range(8)
        ]
        for thread in waiting:
            thread.start()
        until(lambda: control.get("/policy").json()["waiting"] == 8)
        assert len(stage.requests) == asked
        control.post("/resume")
        for thread in waiting:
            thread.join()
        assert len(stage.requests) == asked + 8
    with start() as workers:
        found = control_of(workers.url).get("/policy").json()
        assert found["version"] == 7
        assert ask(workers.url, "later", hello).status_code == 200
    with Reader(str(tmp_path / "bridle.db")) as reader:
        calls = [call for one in reader.sessions() for call in reader.calls(one.id)]
        assert len(calls) == 8 + 2 + 8 + 1
        assert {call.version_start for call in calls} == {7}
        assert not [v for found in audit(reader, bodies=True) for v in found.violations]


@pytest.mark.sampled(0)
def test_a_worker_that_is_replaced_knows_the_engines_of_the_moment(
    stage: Any, start: Start, model_dir: Path, until: Any
) -> None:
    hello = [{"role": "user", "content": "hi"}]
    with (
        ScriptedEngine(
            model_dir,
            lambda _: ScriptedReply("The answer is four."),
            served_model_name="tiny-policy",
        ) as added,
        start() as workers,
    ):
        control = control_of(workers.url)
        control.post("/engines", json={"url": added.base_url + "/v1"}).raise_for_status()
        first = stage.engine.base_url.removeprefix("http://")
        control.delete(f"/engines/{first}").raise_for_status()
        control.put("/policy", json={"version": 3}).raise_for_status()
        before = workers.pids()
        for pid in before:
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: len(set(workers.pids()) - {pid}) == 2)
            until(lambda: workers.up() == set(workers.pids()))
        assert not set(before) & set(workers.pids())
        for number in range(2):
            with stopped(workers.pids()[number]):
                assert ask(workers.url, f"s{number}", hello).status_code == 200
        (state,) = control.get("/engines").json()
        assert (state["url"], state["policy_version"]) == (added.base_url, 3)
    assert (len(stage.requests), len(added.requests)) == (0, 2)


def test_each_worker_replies_with_metrics_of_its_own_under_its_label(start: Start) -> None:
    with start() as workers:
        idle, busy = workers.pids()
        with stopped(idle):
            assert ask(workers.url, "one", [{"role": "user", "content": "hi"}]).is_success
        for _ in range(20):
            pid, text = workers.metrics()
            assert pid in (idle, busy)
            assert ("bridle_calls_total{" in text) is (pid == busy)


def test_a_worker_that_dies_while_it_is_asked_whether_it_lives_is_replaced_at_once(
    start: Start, until: Any
) -> None:
    with start() as workers:
        before = workers.pids()
        os.kill(before[0], signal.SIGSTOP)
        time.sleep(1.5)  # the supervisor asks twice a second, and waits for a minute
        os.kill(before[0], signal.SIGKILL)
        until(lambda: len(set(workers.pids()) - {before[0]}) == 2)


def test_a_lone_proxy_that_restarts_knows_what_its_engine_serves(
    stage: Any, start_proxy: Any, ask: Any
) -> None:
    first = start_proxy(stage.engine.base_url)
    httpx.put(f"{first.url}/bridle/v1/policy", json={"version": 4, "model": "tiny-policy"})
    first.server.stop()
    second = start_proxy(stage.engine.base_url)
    assert httpx.get(f"{second.url}/bridle/v1/policy").json()["version"] == 4
    assert httpx.post(second.url + CHAT, json=ask).status_code == 200
    assert second.call().version_start == 4
