"""Ending what runs in the foreground."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.recipes.models.tiny_tokenizer import train_tokenizer

LEAVES = """
import asyncio, sys, time
from bridle.cli.serving import leave_on_sigterm

async def wait():
    print("ready", flush=True)
    await asyncio.sleep(60)

leave_on_sigterm()
try:
    if sys.argv[1] == "asyncio":
        asyncio.run(wait())
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("left", flush=True)
"""


@pytest.mark.parametrize("inside", ["asyncio", "a plain call"])
@pytest.mark.parametrize("started", ["plainly", "as a shell's background job"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_it_is_ended_as_ctrl_c_does(inside: str, started: str, number: signal.Signals) -> None:
    argv = [sys.executable, "-c", LEAVES, inside]
    if started != "plainly":
        argv = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *argv]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        try:
            assert process.communicate(timeout=20)[0] == "left\n"
        finally:
            process.kill()


def test_under_nohup_it_outlives_its_terminal() -> None:
    argv = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", sys.executable, "-c", LEAVES, "plainly"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.kill()


INTERRUPTED = """
import importlib, signal, sys

module, name = sys.argv.pop(1).split(":")
serving = getattr(importlib.import_module(module), name)
begin = serving.__enter__

def begin_and_interrupt(self):
    begin(self)
    signal.raise_signal(signal.SIGINT)
    return self

serving.__enter__ = begin_and_interrupt
from bridle.cli.program import app
app()
"""
"""A command whose service is interrupted at the moment at which it has started."""


@pytest.mark.parametrize(
    ("service", "command"),
    [
        ("bridle.proxy.server:ProxyServer", ("proxy", "--upstream", "http://127.0.0.1:9")),
        ("bridle.engine.scripted:ScriptedEngine", ("engine", "scripted")),
    ],
)
def test_an_interrupt_while_a_service_starts_stops_it_in_order(
    tmp_path: Path, service: str, command: tuple[str, ...]
) -> None:
    store = tmp_path / "bridle.db"
    asked = [*command, "--port", "0", *(["--store", str(store)] if "proxy" in command else [])]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, service, *asked],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not store.with_name("bridle.db-wal").exists()


LAUNCHES = """
import sys, time
from pathlib import Path
from bridle.run.services import Service

kind, model, folder = sys.argv[1:]
arguments = {
    "engine": ["engine", "embedded", "--model", model],
    "proxy": ["proxy", "--upstream", "http://127.0.0.1:9", "--store", f"{folder}/bridle.db"],
}
with Service([*arguments[kind], "--port", "0"], Path(folder) / "log") as service:
    print(service.pid, service.url, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["engine", "proxy"])
@pytest.mark.loop
def test_a_service_does_not_outlive_a_command_that_is_killed(kind: str, tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    size = train_tokenizer(policy, ["a command that is killed"] * 4, vocab_size=320)
    shape = TinyShape(hidden=32, layers=1, heads=1, kv_heads=1, intermediate=64, context=512)
    make_policy(policy, shape, vocab_size=size, seed=3)
    argv = [sys.executable, "-c", LAUNCHES, kind, str(policy), str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid, url = process.stdout.readline().split()
        process.kill()
    deadline = time.monotonic() + 20
    while listens(url):
        if time.monotonic() > deadline:
            os.kill(int(pid), signal.SIGKILL)
            pytest.fail("the service went on")
        time.sleep(0.1)


def listens(url: str) -> bool:
    try:
        httpx.get(url, trust_env=False)
    except httpx.ConnectError:
        return False
    except httpx.HTTPError:
        return True
    return True
