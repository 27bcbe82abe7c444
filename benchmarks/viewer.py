"""How long the viewer's pages take on a large store: until the first byte, and for list actions."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx

from bridle.bench.gallery import fill

PAGE_MS: Final = 200.0
"""The bar of a page's first byte."""
ACTION_MS: Final = 300.0
"""The bar of what htmx asks for: a filter, an order, the next page of a list."""
TURNS: Final = 4


def measure(
    sessions: int, repeats: int, store: Path | None = None, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Milliseconds of each page (median and largest of ``repeats``), on ``store`` or a new one of
    ``sessions`` sessions."""
    with TemporaryDirectory() as folder:
        path = store or Path(folder) / "store.db"
        if not path.exists():
            say(f"Recording {sessions} sessions.")
            fill(str(path), sessions, turns=TURNS)
        argv = [sys.executable, "-m", "bridle", "viewer", "--store", str(path), "--port", "0"]
        with subprocess.Popen([*argv, "--json"], stdout=subprocess.PIPE, text=True) as viewer:
            try:
                assert viewer.stdout is not None
                url = json.loads(viewer.stdout.readline())["url"]
                say("Reading pages.")
                return _timed(url, repeats)
            finally:
                viewer.terminate()


def _timed(url: str, repeats: int) -> dict[str, Any]:
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        (session, run) = _examples(client)
        pages = {
            "sessions": "/sessions",
            "session": f"/sessions/{session}",
            "tree": f"/sessions/{session}/tree",
            "session audit": f"/sessions/{session}/audit",
            "groups": "/groups",
            "runs": "/runs",
            "run": f"/runs/{run}",
            "audit": "/audit",
        }
        actions = {
            "text filter": "/sessions?text=lamp",
            "break filter": "/sessions?broke=any",
            "reward filter": "/sessions?reward=reward&least=0.5",
            "order by tokens": "/sessions?order=tokens",
            "order by reward": "/sessions?order=reward",
            "page 40": "/sessions?page=40",
            "findings of a run": f"/runs/{run}/findings",
        }
        asked = {"hx-request": "true"}
        return {
            "pages": {name: _first_byte(client, path, repeats, {}) for name, path in pages.items()},
            "actions": {n: _first_byte(client, p, repeats, asked) for n, p in actions.items()},
            "bars_ms": {"pages": PAGE_MS, "actions": ACTION_MS},
        }


def _examples(client: httpx.Client) -> tuple[str, str]:
    """A session and a run that the pages link to."""
    found = []
    for listing in ("/sessions", "/runs"):
        text = client.get(listing).raise_for_status().text
        found.append(text.split(f'href="{listing}/', 1)[1].split('"', 1)[0])
    return found[0], found[1]


def _first_byte(
    client: httpx.Client, path: str, repeats: int, headers: dict[str, str]
) -> dict[str, float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        with client.stream("GET", path, headers=headers) as reply:
            reply.raise_for_status()
            next(reply.iter_raw(), b"")
            times.append(1000 * (time.perf_counter() - start))
    return {"median_ms": round(median(times), 1), "largest_ms": round(max(times), 1)}
