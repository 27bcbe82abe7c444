"""The machine that sessions run on: it runs commands and keeps files for whoever asks over HTTP.

``python -m bridle_remote.server FOLDER`` prints its port. Everything that it does is below FOLDER.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

ROOT = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else Path.cwd()
running: dict[str, subprocess.Popen[bytes]] = {}
lock = threading.Lock()


def run(asked: dict[str, Any]) -> dict[str, Any]:
    """Run a command to its end, or kill it and all that it started when its time is up."""
    if not Path(asked["directory"]).is_dir():
        return {"gone": asked["directory"]}
    began = time.monotonic()
    try:
        process = subprocess.Popen(
            asked["argv"],
            cwd=asked["directory"],
            env=asked["environment"] | {"PWD": asked["directory"]},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return {"refused": f"cannot start {asked['argv'][0]}: {error}"}
    with lock:
        running[asked["id"]] = process
    try:
        out, err = process.communicate(timeout=asked["timeout_s"])
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        code = None
        end(process)
        out, err = process.communicate()
    with lock:
        del running[asked["id"]]
    end(process)
    code = 128 - code if code is not None and code < 0 else code
    texts = {"stdout": out.decode("latin-1"), "stderr": err.decode("latin-1")}
    return {"exit_code": code, "seconds": time.monotonic() - began, **texts}


def end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def reply(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    @property
    def path_asked(self) -> Path | None:
        """The path that a request names, or ``None`` if it leads out of the folder."""
        (named,) = parse_qs(urlsplit(self.path).query)["path"]
        path = Path(named).resolve()
        return path if path.is_relative_to(ROOT) else None

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/exec":
            self.reply(200, json.dumps(run(asked)).encode())
        elif self.path == "/kill":
            with lock:
                if (process := running.get(asked["id"])) is not None:
                    end(process)
            self.reply(204)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        path = self.path_asked
        if path is None:
            return self.reply(403)
        if self.path.startswith("/folder"):
            path.mkdir(parents=True, exist_ok=True)
            with tarfile.open(fileobj=io.BytesIO(body)) as archive:
                archive.extractall(path, filter="data")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body)
        return self.reply(204)

    def do_GET(self) -> None:
        if self.path == "/root":
            return self.reply(200, str(ROOT).encode())
        path = self.path_asked
        if self.path.startswith("/folder") and path is not None and path.is_dir():
            packed = io.BytesIO()
            with tarfile.open(fileobj=packed, mode="w") as archive:
                archive.add(path, ".")
            return self.reply(200, packed.getvalue())
        if self.path.startswith("/file") and path is not None and path.is_file():
            return self.reply(200, path.read_bytes())
        return self.reply(404)

    def do_DELETE(self) -> None:
        if (path := self.path_asked) is not None and path != ROOT:
            shutil.rmtree(path, ignore_errors=True)
        self.reply(204)


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
