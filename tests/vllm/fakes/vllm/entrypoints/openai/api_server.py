"""A stand-in for vLLM's server: the routes that the launcher uses, and ways to go wrong.

``FAKE_VLLM`` names what it does: ``fail`` ends at start with an error as vLLM logs it, ``refuse``
with one about a setting, ``unparsed`` with one about a parser, ``mute`` never becomes healthy,
``dumb`` dies at the first token, ``child`` also starts a process that ignores SIGTERM. With
``FAKE_VLLM_ENGINE`` every other request goes on to the engine at that URL.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Handler(BaseHTTPRequestHandler):
    model = ""
    version = "default"

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer({}, 503 if os.environ.get("FAKE_VLLM") == "mute" else 200)
        elif self.locked():
            self.answer({"error": "Unauthorized"}, 401)
        elif self.path == "/v1/models" and "FAKE_VLLM_ENGINE" not in os.environ:
            self.answer({"data": [{"id": "policy", "root": self.model, "max_model_len": 64}]})
        elif self.path == "/weight_info":
            self.answer({"weight_version": Handler.version})
        elif "FAKE_VLLM_ENGINE" in os.environ and self.path != "/x":
            self.forward(None)
        else:
            self.answer({"pid": os.getpid(), "command": sys.argv})

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", 0))
        raw = self.rfile.read(length)
        body = json.loads(raw or b"{}")
        if self.locked():
            self.answer({"error": "Unauthorized"}, 401)
        elif "FAKE_VLLM_ENGINE" in os.environ and self.path.startswith("/v1/"):
            self.forward(raw)
        elif self.path == "/v1/completions":
            if os.environ.get("FAKE_VLLM") == "dumb":
                print("(Worker pid=1) ERROR [x.py:1] RuntimeError: no kernel", flush=True)
                os._exit(0)
            entries = [None, *({str(each): {"logprob": -1.0}} for each in body["prompt"][1:])]
            self.answer({"choices": [{"prompt_logprobs": entries}]})
        elif self.path == "/update_weight_version":
            Handler.version = body["new_version"]
            self.answer({})
        elif self.path == "/collective_rpc":
            self.call(body)
        else:
            self.answer({}, 404)

    def locked(self) -> bool:
        file = os.environ.get("BRIDLE_GUARD_KEY_FILE")
        sent = self.headers.get("authorization")
        return file is not None and sent != f"Bearer {Path(file).read_text()}"

    def call(self, body: dict[str, Any]) -> None:
        version = None
        if body["method"] == "reload_weights":
            Handler.model = body["kwargs"]["weights_path"]
        else:
            (version,) = body["args"]
        files = [
            (file.name, file.stat().st_size, file.stat().st_mtime_ns)
            for file in sorted(Path(Handler.model).glob("*.safetensors"))
        ]
        note = {"directory": Handler.model, "version": version, "files": files}
        Path(os.environ["BRIDLE_SERVED_FILE"]).write_text(json.dumps(note))
        self.answer({"results": [None]})

    def forward(self, body: bytes | None) -> None:
        url = os.environ["FAKE_VLLM_ENGINE"] + self.path
        header = {"content-type": "application/json"}
        request = urllib.request.Request(url, body, header)  # noqa: S310 - the test chose it
        try:
            with urllib.request.urlopen(request) as reply:  # noqa: S310
                status, kind, data = reply.status, reply.headers["content-type"], reply.read()
        except urllib.error.HTTPError as error:
            status, kind, data = error.code, error.headers["content-type"], error.read()
        self.send(data, status, kind)

    def answer(self, body: dict[str, Any], status: int = 200) -> None:
        self.send(json.dumps(body).encode(), status, "application/json")

    def send(self, data: bytes, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--model")
    options, _ = parser.parse_known_args()
    Handler.model = options.model
    if os.environ.get("FAKE_VLLM") == "fail":
        print("(APIServer pid=1) ERROR 11-21 [core.py:1] ValueError: no such flag", flush=True)
        print("RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
        sys.exit(1)
    if os.environ.get("FAKE_VLLM") == "refuse":
        print("pydantic_core.ValidationError: 1 validation error for ModelConfig", flush=True)
        print("  Value error, 9 tokens are too long [type=value_error, input_value=1]", flush=True)
        sys.exit(1)
    if os.environ.get("FAKE_VLLM") == "unparsed":
        print("TypeError: --reasoning-parser odd cannot be used with the tokenizer", flush=True)
        sys.exit(1)
    if os.environ.get("FAKE_VLLM") == "child":
        ignoring = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", ignoring])
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    time.sleep(0.1)
    ThreadingHTTPServer((options.host, options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
