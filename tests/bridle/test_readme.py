"""The README's walkthrough for recording, without torch and outside a checkout.

It runs as typed, but for the ports.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import pytest

from support.processes import free_port
from support.typed import WAIT, console_blocks

ROOT = Path(__file__).parents[2]


@pytest.fixture
def without_torch(tmp_path: Path) -> Path:
    """A folder for ``PYTHONPATH`` in whose interpreters torch cannot be imported."""
    folder = tmp_path / "startup"
    folder.mkdir()
    hidden = "import sys\nfor name in ('torch', 'transformers'):\n    sys.modules[name] = None\n"
    (folder / "sitecustomize.py").write_text(hidden)
    return folder


def test_the_first_screen_has_what_works_from_a_checkout() -> None:
    """Each target exists, and each extra; the exports of the walkthrough have what they need."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 70
    install, *rest = console_blocks(text)
    targets = re.findall(r"^make (\w+)", install, flags=re.MULTILINE)
    assert targets == ["demo", "test"]
    rules = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}: \$\(READY\)", rules, re.MULTILINE) for target in targets)
    recorder, trainer = re.findall(r"^pip install -e '\.\[(\w+)\]'", install, re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = extras["optional-dependencies"][recorder]
    assert ("weather.parquet" in "".join(rest)) == any(
        one.startswith("pyarrow") for one in packages
    )
    assert trainer in extras["optional-dependencies"]
    assert not re.search(r"pip install '?bridle-rl", "".join(rest)), "it is not on the index yet"


@pytest.mark.loop
def test_the_walkthrough_works_as_typed(tmp_path: Path, without_torch: Path) -> None:
    ports = {"8000": str(free_port()), "8484": str(free_port())}
    typed = re.sub("8000|8484", lambda port: ports[port[0]], (ROOT / "README.md").read_text())
    _install, codex, own = console_blocks(typed)
    engine, proxy = (line.partition("#")[0].strip() for line in codex.strip().splitlines()[:2])
    proxy = f"{proxy.removesuffix('&')} --port {ports['8484']} &"
    proxy_url = f"http://127.0.0.1:{ports['8484']}"
    script = "\n".join(
        [
            "set -e",
            "trap 'kill $(jobs -p); wait' EXIT",
            *(engine, WAIT.format(f"http://127.0.0.1:{ports['8000']}/health")),
            *(proxy, WAIT.format(f"{proxy_url}/readyz")),
            own,
        ]
    )
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(without_torch),
            "BRIDLE_PROXY": proxy_url,
            "BRIDLE_HOME": str(tmp_path / "home"),
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "The tool returned: snow, -3 °C" in done.stdout
    assert "The tool returned: sun, 24 °C" in done.stdout
    assert "Every token is accounted for." in done.stdout
    rows = [json.loads(line) for line in (folder / "weather.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{proxy_url}/healthz", trust_env=False)
