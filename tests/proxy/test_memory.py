"""What a proxy that only records has no use for stays out of its memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
from proxy.server import ProxyServer
from proxy.settings import Limits, ProxySettings

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
