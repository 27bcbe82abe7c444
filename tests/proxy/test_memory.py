"""Test that a proxy that only records keeps nothing useless in its memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bridle.bench.proxy import upstream_process

HEAVY = (
    "aiohttp",
    "fastapi",
    "httpx",
    "jinja2",
    "opentelemetry",
    "pandas",
    "pyarrow",
    "pydantic",
    "tokenizers",
    "torch",
    "transformers",
)

SERVES = """
import json, sys, urllib.error, urllib.request
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import Limits, ProxySettings

def ask(path, body=None):
    try:
        with urllib.request.urlopen(server.base_url + path, body) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code

settings = ProxySettings("http://127.0.0.1:9", sys.argv[1], limits=Limits(retries=0))
with ProxyServer(settings) as server:
    chat = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]}).encode()
    told = [ask("/healthz"), ask("/readyz"), ask("/metrics"), ask("/v1/chat/completions", chat)]
    before = sorted(set(sys.argv[2:]) & sys.modules.keys())
    told.append(ask("/bridle/v1/policy"))
    print(json.dumps([told, before, "fastapi" in sys.modules]))
"""


def test_recording_loads_neither_the_control_framework_nor_tokenizers(tmp_path: Path) -> None:
    script = [sys.executable, "-c", SERVES, str(tmp_path / "bridle.db"), *HEAVY]
    told = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    assert told.strip() == "[[200, 503, 200, 502, 200], [], true]"


LEAVES = """
import gc, json, sys, urllib.request
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings

def ask(model, stream):
    body = {"model": model, "stream": stream, "messages": [{"role": "user", "content": "x"}]}
    request = urllib.request.Request(
        server.base_url + "/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as reply:
        return reply.read()

with ProxyServer(ProxySettings(sys.argv[1], sys.argv[2])) as server:
    ask("bench-small", False)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    for _ in range(4):
        assert b"four" in ask("bench-small", False)
        assert b"[DONE]" in ask("bench-stream", True)
    gc.collect()
    left = {type(each) for each in gc.garbage}
    ours = sorted(f"{kind.__module__}.{kind.__name__}" for kind in left)
    print(json.dumps([name for name in ours if name.startswith(("bridle.", "uvicorn."))]))
"""


def test_calls_leave_nothing_for_the_collector_of_cycles(tmp_path: Path) -> None:
    """It runs rarely, and what waits for it would be each call's bodies."""
    with upstream_process(None) as engine:
        script = [sys.executable, "-c", LEAVES, engine, str(tmp_path / "bridle.db")]
        told = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    assert json.loads(told) == []
