"""Ending what runs in the foreground."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

LEAVES = """
import asyncio, sys, time
from bridle.serving import leave_on_sigterm

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
def test_sigterm_ends_it_as_ctrl_c_does(inside: str, started: str) -> None:
    argv = [sys.executable, "-c", LEAVES, inside]
    if started != "plainly":
        argv = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *argv]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        try:
            assert process.communicate(timeout=20)[0] == "left\n"
        finally:
            process.kill()
