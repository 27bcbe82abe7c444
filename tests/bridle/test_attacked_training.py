"""A hostile agent inside real training: what the trainer reads is what the verifier gave."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from bridle.reconstruct.exports.formats import ExportFormat, export
from bridle.reconstruct.exports.selection import Selection
from bridle.store.reading.queries import Reader
from bridle.store.records import Reward, RewardSource
from bridle.store.writing.writer import Writer

pytestmark = [pytest.mark.loop, pytest.mark.usefixtures("warm_start")]

HOSTILE = Path(__file__).parents[1] / "security/hostile_agent.py"
ATTACK = f"""
import json, runpy
from pathlib import Path
attack = runpy.run_path({str(HOSTILE)!r}, run_name="attack")["attack"]
with Path(LOG).open("a") as log:
    log.write(json.dumps(attack("inside")) + "\\n")
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
        yield [f"--engine={engine}", f"--proxy={proxy}", f"--store={store}"]


@pytest.mark.parametrize("commands", ["train", "compose"])
def test_the_trainer_reads_the_verifiers_rewards_alone(
    training_arguments: Callable[..., list[str]], tmp_path: Path, commands: str
) -> None:
    log = tmp_path / "log"
    log.touch()
    log.chmod(0o666)
    arguments = training_arguments(ATTACK.replace("LOG", repr(str(log))))
    keys = tmp_path / "keys"
    keys.mkdir(mode=0o700)
    (keys / "admin").write_text("admin-key-of-the-test-0123456789")
    (keys / "admin").chmod(0o600)
    env = {**os.environ}
    store = tmp_path / "out" / "bridle.db"
    with ExitStack() as stack:
        if commands == "compose":
            env["BRIDLE_ADMIN_KEY_FILE"] = str(keys / "admin")
            store = tmp_path / "bridle.db"
            services = stack.enter_context(compose_services(tmp_path / "policy", store, env))
            arguments = ["trainer", *arguments[1:], *services]
        done = subprocess.run(
            [sys.executable, "-m", "bridle", *arguments, "--steps", "1"],
            capture_output=True,
            text=True,
            check=False,
            env=env,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    attacks = [one for line in log.read_text().splitlines() for one in json.loads(line)]
    assert attacks, "they did attack"
    assert not [one for one in attacks if one[2] in range(200, 300)]
    with Reader(str(store)) as reader:
        (run,) = reader.runs("train")
        sessions = list(reader.sessions(run=run.id))
        given = [reward for one in sessions for reward in reader.rewards(one.id)]
        (mean,) = reader.metrics(run.id, "reward/mean")
    assert {reward.source for reward in given} == {RewardSource.VERIFIER}
    assert len(given) == len(sessions) == 12
    assert mean.value == pytest.approx(sum(one.value for one in given) / len(given))

    bonus = Reward(sessions[0].id, "bonus", 100.0, time.time(), source=RewardSource.UNATTESTED)
    with Writer(str(store)) as writer:
        writer.add_sync(bonus)
    with Reader(str(store)) as reader:
        report = export(
            reader, tmp_path / "x.parquet", ExportFormat.TOKENS, Selection(run=run.id), "tree"
        )
    assert report.rewards.keys() == {"reward"}, "an export reads what the run's training reads"
