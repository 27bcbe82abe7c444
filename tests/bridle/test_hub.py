"""A model named as on the Hugging Face Hub: fetched once, and a remedy where that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from click.testing import Result

from bridle.run.hub import cached_tokenizer, model_directory

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "tokenizer.json": b'{"version": "1.0"}',
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"other weights",
}


class Hub(BaseHTTPRequestHandler):
    """The two routes of the Hub that a download uses, for the model ``tiny/model``."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        self.asked.append(self.path)
        name = self.path.rpartition("/")[2]
        if self.path.startswith("/api/models/tiny/model"):
            tree = [{"rfilename": each} for each in FILES]
            content = json.dumps({"id": "tiny/model", "sha": COMMIT, "siblings": tree}).encode()
            if "/tree/" in self.path:
                files = [
                    {"type": "file", "path": each, "size": len(FILES[each]), "oid": each}
                    for each in FILES
                ]
                content = json.dumps(files).encode()
        elif self.path.startswith("/tiny/model/resolve/") and name in FILES:
            content = FILES[name]
        else:
            self.send_response(404)
            self.send_header("content-length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.send_header("x-repo-commit", COMMIT)
        self.send_header("etag", f'"{name}"')
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []
    handler = type("AskedHub", (Hub,), {"asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def fetched(function: str, home: Path, endpoint: str, **more: str) -> str:
    """Return the result of ``function`` of ``run/hub.py`` for ``tiny/model``.

    It runs in a process of its own: the Hub's address is read when its library is imported.
    """
    script = (
        "import sys; from bridle.errors import BridleError; from bridle.run import hub\n"
        f"try: print(hub.{function}('tiny/model'))\n"
        "except BridleError as error: sys.exit(str(error))"
    )
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), **more}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**environment, "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or done.stderr.strip()


def test_a_model_is_fetched_once_without_what_is_not_needed(
    hub: tuple[str, list[str]], tmp_path: Path
) -> None:
    endpoint, asked = hub
    tokenizer = Path(fetched("tokenizer_directory", tmp_path, endpoint))
    assert sorted(each.name for each in tokenizer.iterdir()) == [
        "chat_template.jinja",
        "tokenizer.json",
    ]
    model = Path(fetched("model_directory", tmp_path, endpoint))
    assert (model / "model.safetensors").read_bytes() == b"weights"
    assert not (model / "pytorch_model.bin").exists()
    before = [path for path in asked if "/resolve/" in path]
    assert Path(fetched("model_directory", tmp_path, endpoint)) == model
    assert [path for path in asked if "/resolve/" in path] == before
    offline = {"HF_HUB_OFFLINE": "1"}
    assert Path(fetched("model_directory", tmp_path, "http://127.0.0.1:9", **offline)) == model
    assert Path(fetched("cached_tokenizer", tmp_path, "http://127.0.0.1:9")) == model


def test_without_a_network_the_error_says_what_to_do(tmp_path: Path) -> None:
    said = fetched("model_directory", tmp_path, "http://127.0.0.1:9")
    assert said.startswith("tiny/model is no directory here and cannot be fetched from the Hub: ")
    assert "`hf download tiny/model`" in said


def test_what_is_neither_a_directory_nor_a_name_is_refused(
    bridle: Callable[..., Result], tmp_path: Path
) -> None:
    refused = bridle("engine", "embedded", "--model", tmp_path / "missing")
    assert refused.exit_code == 2
    told = " ".join(refused.stderr.replace("│", " ").split())
    assert (
        "is neither a directory, nor one of smollm2, tiny, nor a name on the Hub (OWNER/MODEL)"
        in told
    )
    assert model_directory(str(tmp_path)) == tmp_path
    assert cached_tokenizer(str(tmp_path)) is None
    assert cached_tokenizer("nobody/has-this") is None
