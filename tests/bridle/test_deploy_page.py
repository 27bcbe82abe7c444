"""Every command of docs/deploy.md works as it stands there, ports and engines aside."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bridle.engine.scripted import ScriptedEngine, ScriptedReply
from support.processes import free_port

pytestmark = pytest.mark.loop

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"
BLOCKS = re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.DOTALL)
UP = "for _ in $(seq 600); do curl -sf {url}/healthz >/dev/null && break; sleep 0.1; done\n"


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_pages_commands_work(number: int, model_dir: Any, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    (tmp_path / "bridle").write_text(f'#!/bin/sh\nexec {sys.executable} -m bridle "$@"\n')
    (tmp_path / "bridle").chmod(0o755)
    engines = [
        ScriptedEngine(model_dir, lambda _: ScriptedReply("four"), served_model_name="m")
        for _ in range(2)
    ]
    with engines[0], engines[1]:
        script = BLOCKS[number].replace("http://127.0.0.1:8484", url)
        for port, engine in zip(("8000", "8001"), engines, strict=True):
            script = script.replace(f"127.0.0.1:{port}", engine.base_url.removeprefix("http://"))
        script = script.replace("bridle proxy ", f"bridle proxy --port {url.rpartition(':')[2]} ")
        script = re.sub(r"&\n", "&\n" + UP.format(url=url), script)
        path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path}
        environment |= {"BRIDLE_PROXY": url, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            ["bash", "-euxc", f"trap 'kill $(jobs -p); wait' EXIT\n{script}"],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
