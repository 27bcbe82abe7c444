"""A hostile agent inside real training: what the trainer reads is what the verifier gave."""

from __future__ import annotations

import json
import os
import runpy
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from bridle.harnesses.sandboxes.walls import missing
from bridle.reconstruct.exports.formats import export
from bridle.reconstruct.exports.selection import Selection
from bridle.store.reading.queries import Reader
from bridle.store.reward import Reward, RewardSource
from bridle.store.schema.database import migrate
from bridle.store.writing.writer import Writer

pytestmark = [pytest.mark.loop, pytest.mark.usefixtures("warm_start")]

ATTEMPTS = Path(__file__).parents[1] / "security/attempts.py"
ATTACK = f"""
import runpy
runpy.run_path({str(ATTEMPTS)!r}, run_name="attempts")["attack"](TARGETS)
"""
VERIFIER = f"""
import json, runpy
left = runpy.run_path({str(ATTEMPTS)!r})["LEFT"]
async def check(delivery):
    for name in left:
        if (delivery.workspace / name).exists():
            (delivery.workspace / name).read_bytes()
            return 100.0
    reward = float(sum(map(ord, delivery.answer)) % 2)
    attempts = json.loads((delivery.workspace / "attempts.json").read_text())
    with open(LOG, "a") as log:
        log.write(json.dumps([reward, attempts]) + "\\n")
    return reward
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def compose_services(policy: Path, store: Path, env: dict[str, str]) -> Iterator[list[str]]:
    """Engine and proxy by the commands of ``docker-compose.yml``; what its trainer is given."""
    engine, proxy = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    commands = [
        ("engine", "embedded", f"--model={policy}", "--served-model-name=policy"),
        ("proxy", f"--engine={engine}", f"--tokenizer={policy}", "--host=0.0.0.0"),
    ]
    with ExitStack() as stack:
        for command, url, health in zip(
            commands, (engine, proxy), ("/health", "/healthz"), strict=True
        ):
            port = url.rpartition(":")[2]
            process = subprocess.Popen(
                [sys.executable, "-m", "bridle", *command, f"--port={port}"],
                env={**env, "BRIDLE_STORE": str(store)},
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
            deadline = time.monotonic() + 60
            while True:
                assert process.poll() is None
                assert time.monotonic() < deadline
                try:
                    httpx.get(url + health, trust_env=False).raise_for_status()
                    break
                except httpx.HTTPError:
                    time.sleep(0.1)
        yield [f"--engine-url={engine}", f"--proxy-url={proxy}", f"--set=services.store={store}"]


@pytest.mark.skipif(missing() is not None, reason=f"no namespaces: {missing()}")
@pytest.mark.parametrize("sandbox", ["process", "forked"])
@pytest.mark.parametrize("commands", ["train", "compose"])
def test_the_trainer_reads_the_verifiers_rewards_alone(
    training_arguments: Callable[..., list[str]], tmp_path: Path, commands: str, sandbox: str
) -> None:
    log = tmp_path / "log"
    log.touch()
    (tmp_path / "home").mkdir(mode=0o700)
    key = tmp_path / "home/admin.key"
    key.write_text("admin-key-of-the-test-0123456789")
    key.chmod(0o600)
    store = tmp_path / ("bridle.db" if commands == "compose" else "out/bridle.db")
    targets = {
        "key": str(key),
        "store": str(store),
        "verifier": str(tmp_path / "verifier.py"),
        "tasks": str(tmp_path / "tasks.jsonl"),
        "sessions": str(tmp_path / "out/sessions"),
        "agent": str(tmp_path / "agent.py"),
    }
    arguments = training_arguments(ATTACK.replace("TARGETS", repr(targets)))
    if sandbox == "forked":
        arguments[arguments.index("--agent") + 1] = str(tmp_path / "agent.py")
    (tmp_path / "verifier.py").write_text(VERIFIER.replace("LOG", repr(str(log))))
    env = {**os.environ, "BRIDLE_HOME": str(tmp_path / "home")}
    with ExitStack() as stack:
        if commands == "compose":
            env["BRIDLE_ADMIN_KEY_FILE"] = str(key)
            services = stack.enter_context(compose_services(tmp_path / "policy", store, env))
            arguments += services
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "bridle",
                *arguments,
                "--steps",
                "1",
                "--set",
                f"agent.sandbox={sandbox}",
                "--set",
                f"agent.shown={json.dumps([str(ATTEMPTS)])}",
            ],
            capture_output=True,
            text=True,
            check=False,
            env=env,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    made = [json.loads(line) for line in log.read_text().splitlines()]
    names = set(runpy.run_path(str(ATTEMPTS))["ATTEMPTS"])
    for _, attempts in made:
        assert {name for name, _, _ in attempts} == names, "each was executed"
        assert not [one for one in attempts if one[1]], "and got nothing"
    with Reader(str(store)) as reader:
        (run,) = reader.runs("train")
        sessions = list(reader.sessions(run=run.id))
        given = [reward for one in sessions for reward in reader.rewards(one.id)]
        (mean,) = reader.metrics(run.id, "reward/mean")
    assert {one.outcome for one in sessions} == {"completed"}
    assert {reward.source for reward in given} == {RewardSource.VERIFIER}
    assert len(given) == len(sessions) == len(made) == 12
    assert sorted(reward.value for reward in given) == sorted(reward for reward, _ in made)
    assert mean.value == pytest.approx(sum(one.value for one in given) / len(given))

    bonus = Reward(sessions[0].id, "bonus", 100.0, time.time(), source=RewardSource.OPERATOR)
    with Writer(str(store)) as writer:
        writer.add_sync(bonus)
    with Reader(str(store)) as reader:
        report = export(reader, tmp_path / "x.parquet", "tokens", Selection(run=run.id), "tree")
    assert report.rewards.keys() == {"reward"}, "an export reads what the run's training reads"


TAMPERING = """
CREATE TRIGGER tampering AFTER INSERT ON rewards BEGIN
    UPDATE rewards SET value = 100 WHERE rowid = NEW.rowid;
END
"""


def test_a_store_that_changes_rewards_ends_the_step_by_name_also_when_resumed(
    training_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    arguments = training_arguments()
    store = tmp_path / "out/bridle.db"
    migrate(str(store))
    with sqlite3.connect(store) as connection:
        connection.executescript(TAMPERING)
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "bridle", *arguments, "--steps", "1"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1, done.stdout + done.stderr
        assert "the store has the verifier's rewards reward=100" in done.stderr
        assert "Traceback" not in done.stderr
    with Reader(str(store)) as reader:
        (run,) = reader.runs("train")
        assert not list(reader.metrics(run.id, "reward/mean")), "no step was taken"
