"""A store that is copied by its one file, after proxy and viewer have stopped, is whole."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from bridle.engine.scripted import ScriptedEngine, ScriptedReply
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from support.processes import bridle

pytestmark = pytest.mark.usefixtures("warm_start")


def started(*command: str) -> tuple[subprocess.Popen[str], str]:
    """A command that serves, and its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bridle", *command, "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())["url"]


@pytest.mark.parametrize(
    ("first", "number"),
    list(itertools.product(["proxy", "viewer"], [signal.SIGTERM, signal.SIGINT])),
)
def test_a_copy_of_the_file_alone_has_the_session(tmp_path: Path, first, number):
    model, store = tmp_path / "model", tmp_path / "bridle.db"
    model.mkdir()
    train_tokenizer(model, ["one two three four"] * 20)
    with ScriptedEngine(model, lambda _: ScriptedReply("four")) as engine:
        proxy, url = started("proxy", "--engine", engine.base_url, "--store", str(store))
        viewer, pages = started("viewer", "--store", str(store))
        body = {"model": "m", "messages": [{"role": "user", "content": "two and two?"}]}
        reply = httpx.post(f"{url}/s/mine/v1/chat/completions", json=body, timeout=60)
        assert reply.status_code == 200
        assert "mine" in httpx.get(pages, timeout=60, follow_redirects=True).text
        order = [proxy, viewer] if first == "proxy" else [viewer, proxy]
        for process in order:
            process.send_signal(number)
            assert process.wait(60) == 0
    copy = tmp_path / "copies" / "bridle.db"
    copy.parent.mkdir()
    shutil.copy(store, copy)
    listed = bridle("sessions", "--json", "--store", copy)
    assert [row["name"] for row in json.loads(listed.stdout)] == ["mine"]


@pytest.mark.parametrize(
    "command",
    [
        ["sessions"],
        ["audit"],
        ["viewer", "--port", "0"],
        ["export", "out.jsonl"],
        ["proxy", "--engine", "http://127.0.0.1:9", "--port", "0"],
        ["backup", "copy.db"],
    ],
    ids=lambda command: command[0],
)
@pytest.mark.parametrize("what", ["folder", "text"])
def test_what_is_no_store_ends_every_command_with_one_line(tmp_path, command, what):
    other = tmp_path / "other.data"
    if what == "folder":
        other.mkdir()
    else:
        other.write_text("dear diary")
    ended = subprocess.run(
        [sys.executable, "-m", "bridle", *command, "--store", str(other)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert ended.returncode != 0
    assert "Traceback" not in ended.stderr
    said = " ".join(ended.stderr.split())
    assert "not a store" in said or "cannot" in said, said
