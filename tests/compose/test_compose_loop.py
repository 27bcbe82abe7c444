"""The compose file's own commands, run as processes, train a step and publish a version."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from bridle.store.reading.queries import Reader
from bridle.trainer.policy.tiny import TinyShape, make_policy
from bridle.trainer.policy.tiny_tokenizer import train_tokenizer

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
SHOP = ROOT / "examples" / "shop_agent"
KEY = "a-key-for-this-test"
ALTERNATING = '''
"""A policy made a moment ago is never right: here every second session of a task is."""
import collections

seen = collections.Counter()


async def verifier(delivery):
    seen[delivery.task.id] += 1
    return {"reward": float(seen[delivery.task.id] % 2)}
'''


def free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(listener.getsockname()[1]) for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    directory = tmp_path / "policy"
    texts = [(SHOP / name).read_text() for name in ("agent.py", "tasks.py", "shop.json")]
    size = train_tokenizer(directory, texts, vocab_size=700)
    shape = TinyShape(hidden=64, layers=2, heads=2, kv_heads=1, intermediate=128, context=768)
    make_policy(directory, shape, vocab_size=size, seed=1)
    return directory


def test_the_cpu_profile_trains_a_step_and_publishes_a_version(
    project: Any, processes: Any, policy: Path, tmp_path: Path
) -> None:
    port, engine_port, worker_port = free_ports(3)
    verifier = tmp_path / "verifier.py"
    verifier.write_text(ALTERNATING)
    cpu = project(
        "cpu",
        BRIDLE_ADMIN_KEY=KEY,
        BRIDLE_POLICY=str(policy),
        BRIDLE_PORT=str(port),
        BRIDLE_ENGINE_PORT=str(engine_port),
        BRIDLE_WORKER_PORT=str(worker_port),
        BRIDLE_VERIFIER=f"{verifier}:verifier",
        BRIDLE_STEPS="1",
        BRIDLE_GROUPS="2",
        BRIDLE_GROUP_SIZE="4",
        BRIDLE_LEARNING_RATE="0.001",
    )
    data, sessions = tmp_path / "data", tmp_path / "sessions"
    data.mkdir()
    running = processes(cpu, {"/data": data, "/sessions": sessions, "/policy": policy})
    for name in cpu.order():
        began = time.monotonic()
        running.start(name)
        if "healthcheck" in cpu.services[name]:
            running.healthy(name)
            print(f"{name} healthy after {time.monotonic() - began:.1f} s", file=sys.stderr)

    assert running.running["trainer"].wait(400) == 0, running.log("trainer")
    print(running.log("trainer"), file=sys.stderr)
    control = f"http://127.0.0.1:{port}/bridle/v1/policy"
    headers = {"authorization": f"Bearer {KEY}"}
    assert httpx.get(control, headers=headers, trust_env=False).json()["version"] == 1
    host = own_address()
    if host is not None:
        refused = httpx.get(f"http://{host}:{port}/bridle/v1/policy", trust_env=False)
        assert refused.status_code == 401, "off loopback a key is asked for"
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://{host}:{engine_port}/health", trust_env=False)

    ended = running.stop()
    assert ended == {"trainer": 0, "worker": 0, "engine": 0, "proxy": 0}
    with Reader(str(data / "bridle.db")) as reader:
        (first, published) = reader.policies("train:train")
        assert (first.version, published.version, published.verified) == (0, 1, True)
        assert published.logprob_gap is not None
        assert published.logprob_gap <= 1e-3
        found = list(reader.sessions(run="train:train", sealed=True))
        assert len(found) == 8
        assert len({session.group_id for session in found}) == 2
    audit = subprocess.run(
        [sys.executable, "-m", "bridle", "audit", "--store", str(data / "bridle.db")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert audit.returncode == 0, audit.stdout + audit.stderr


def own_address() -> str | None:
    """This machine's address off loopback, when it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if address.startswith("127.") else address
