"""The README's five commands, as they are typed, end with a recorded Codex session in a page."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from bridle.proxy.server import listening

pytestmark = pytest.mark.harness

README = Path(__file__).parents[2] / "README.md"
_PATIENCE_S = 120.0
_CONNECT = 'import socket; socket.create_connection(("127.0.0.1", {port}))'
_LISTENS = f"until {sys.executable} -c '{_CONNECT}' 2>/dev/null; do sleep 0.2; done"


def five_commands() -> list[str]:
    block = re.search(r"Five commands.*?```console\n(.*?)```", README.read_text(), re.DOTALL)
    assert block is not None
    return [line.partition("  #")[0].strip() for line in block[1].splitlines() if line]


def free_ports(count: int) -> list[int]:
    held = [listening("127.0.0.1", 0) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


def test_five_commands_lead_to_a_codex_session_in_a_page(tmp_path: Path) -> None:
    commands = five_commands()
    assert len(commands) == 5
    engine, proxy, viewer = free_ports(3)
    # A person types on when a command in the background has said where it listens.
    commands[0] += f"\n{_LISTENS.format(port=engine)}"
    commands[1] += f"\n{_LISTENS.format(port=proxy)}"
    script = "\n".join(commands).replace("8000", str(engine))
    script = script.replace("bridle proxy", f"bridle proxy --port {proxy}")
    script = script.replace("bridle viewer", f"bridle viewer --port {viewer}")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "BRIDLE_HOME": str(tmp_path / "home"),
        "BRIDLE_PROXY": f"http://127.0.0.1:{proxy}",
    }
    log = tmp_path / "log"
    with log.open("wb") as output:
        typed = subprocess.Popen(
            ["bash", "-c", script],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        pages = f"http://127.0.0.1:{viewer}"
        page = _page(f"{pages}/sessions", typed, log)
        assert ">codex<" in page, log.read_text()[-3000:]
        (link,) = re.findall(r'href="(/sessions/[^"?]+)">', page)
        assert "What is in this folder?" in httpx.get(f"{pages}{link}", trust_env=False).text
    finally:
        os.killpg(typed.pid, signal.SIGTERM)
        typed.wait()


def _page(url: str, typed: subprocess.Popen[bytes], log: Path) -> str:
    """The page, as soon as the last command serves it."""
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        try:
            return httpx.get(url, trust_env=False, timeout=10).text
        except httpx.TransportError:
            assert typed.poll() is None, log.read_text()[-3000:]
            time.sleep(0.2)
    raise AssertionError(log.read_text()[-3000:])
