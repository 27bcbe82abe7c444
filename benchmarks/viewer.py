"""A benchmark of the viewer's pages on a large store.

It measures the time to the first byte, for pages and for list actions. It also measures the latency
that a proxy adds to its calls while someone reads the pages of the store that it records into.
"""

from __future__ import annotations

import html
import itertools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx

from bridle.bench.gallery import add_session, fill
from bridle.bench.proxy import CASES, added_meanwhile
from bridle.proxy.app import PAGES
from bridle.run.environment import admin_key_for

PAGE_MS: Final = 200.0
"""The bar for a page's first byte, in milliseconds."""
ACTION_MS: Final = 300.0
"""The bar for a request of htmx, in milliseconds: a filter, an order, the next page of a list."""
ADDED_MS: Final = (1.0, 4.0)
"""The proxy's bars for the milliseconds that it adds to p50 and p99 of one caller's calls."""
BY_PAGES_MS: Final = (1.0, 3.0)
"""The bars for the milliseconds that readers of pages add to p50 and p99 of a neighbour's calls."""
TURNS: Final = 4
LONG: Final = 300
"""Number of turns of one long session."""
RESTS_S: Final = 0.5
"""Seconds that a reader pauses between two pages."""


def measure(
    sessions: int,
    repeats: int,
    store: Path | None = None,
    say: Callable[[str], None] = print,
    *,
    record_s: float = 5.0,
    record_runs: int = 3,
) -> dict[str, Any]:
    """Measure the pages, and a proxy's calls while the pages are read.

    The report has the milliseconds of each page (median and largest of ``repeats``), on ``store``
    or on a new store of ``sessions`` sessions. It has the milliseconds that recording adds,
    measured ``record_runs`` times for ``record_s`` seconds, while the pages are read from a viewer,
    and while they are read from the proxy itself.
    """
    with TemporaryDirectory(prefix="bridle-bench-") as folder:
        path = store or Path(folder) / "store.db"
        if not path.exists():
            say(f"Recording {sessions} sessions.")
            fill(str(path), sessions, turns=TURNS)
        copy = Path(folder) / "with-a-long-session.db"
        shutil.copyfile(path, copy)
        long = add_session(str(copy), turns=LONG)
        with _viewer(copy) as client:
            say("Reading pages.")
            addresses = _addresses(client, long)
            asked = {"hx-request": "true"}
            timed = {
                kind: {
                    name: _first_byte(client, address, repeats, {} if kind == "pages" else asked)
                    for name, address in of.items()
                }
                for kind, of in addresses.items()
            }
            say("Recording while pages are read.")
            opened = itertools.cycle(addresses["pages"].values())

            def read(_: str) -> None:
                client.get(next(opened)).raise_for_status()
                time.sleep(RESTS_S)

            def read_own(proxy: str) -> None:
                signed = {"authorization": f"Bearer {admin_key_for(proxy)}"}
                address = f"{proxy}{PAGES}{next(opened)}"
                client.get(address, headers=signed).raise_for_status()
                time.sleep(RESTS_S)

            (case,) = (case for case in CASES if case.name == "c1")
            added, added_own = (
                added_meanwhile(copy, case, record_runs, record_s, each)
                for each in (read, read_own)
            )
    return {
        **timed,
        "bars_ms": {"pages": PAGE_MS, "actions": ACTION_MS},
        "recording": {
            "added_ms": _named(added["to_engine"]),
            "added_own_pages_ms": _named(added_own["to_engine"]),
            "bars_ms": _named(ADDED_MS),
        },
        "neighbour": {
            "added_ms": _named(added["to_proxy"]),
            "added_own_pages_ms": _named(added_own["to_proxy"]),
            "bars_ms": _named(BY_PAGES_MS),
        },
    }


def _named(figures: tuple[float | None, float | None]) -> dict[str, float | None]:
    return dict(zip(("p50", "p99"), figures, strict=True))


def over_bars(report: Mapping[str, Any]) -> list[str]:
    """Return the names of the figures that are above their bars."""
    bars = report["bars_ms"]
    slow = [n for kind in bars for n, ms in report[kind].items() if ms["median_ms"] > bars[kind]]
    for name in ("recording", "neighbour"):
        of = report[name]
        for key, whose in (("added_ms", ""), ("added_own_pages_ms", ", own pages")):
            over = [one for one, most in of["bars_ms"].items() if of[key][one] > most]
            slow += [f"{name}{whose} {one}" for one in over]
    return slow


@contextmanager
def _viewer(store: Path) -> Iterator[httpx.Client]:
    """Run a viewer of ``store``, and yield a client of its pages."""
    argv = [sys.executable, "-m", "bridle", "viewer", "--store", str(store), "--port", "0"]
    with subprocess.Popen([*argv, "--json"], stdout=subprocess.PIPE, text=True) as viewer:
        try:
            assert viewer.stdout is not None
            url = json.loads(viewer.stdout.readline())["url"]
            with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
                yield client
        finally:
            viewer.terminate()


def examples(client: Any) -> tuple[str, str, str]:
    """Return the addresses of the pages of a session, of a run and of a group."""
    return (
        linked(client, "/sessions?order=newest&reverse=true", "/sessions/"),
        linked(client, "/runs", "/runs/"),
        linked(client, "/groups", "/group?id="),
    )


def _addresses(client: httpx.Client, long: str) -> dict[str, dict[str, str]]:
    session, run, group = examples(client)
    return {
        "pages": {
            "sessions": "/sessions",
            "session": session,
            "tree": f"{session}/tree",
            "session audit": f"{session}/audit",
            "long session": f"/sessions/{long}",
            "long tree": f"/sessions/{long}/tree",
            "groups": "/groups",
            "group": group,
            "runs": "/runs",
            "run": run,
            "audit": "/audit",
            "audit of a text": "/audit?text=lamp",
        },
        "actions": {
            "text filter": "/sessions?text=lamp",
            "text that is nowhere": "/sessions?text=zzqzz",
            "break filter": "/sessions?broke=any",
            "kind filter": "/sessions?kind=compaction",
            "fate filter": "/sessions?fate=masked",
            "reward filter": "/sessions?reward=reward&least=0.5",
            "order by tokens": "/sessions?order=tokens",
            "order by reward": "/sessions?order=reward",
            "order by duration": "/sessions?order=duration",
            "page 40": "/sessions?page=40",
            "findings of a run": f"{run}/findings",
            "lanes of a run": f"{run}/lanes",
            "turns 200 to 211": f"/sessions/{long}/turns?first=200",
            "tokens of a turn": f"/sessions/{long}/turns/{LONG}/tokens?observed=true",
            "difference of a turn": f"/sessions/{long}/turns/{LONG // 2}/diff",
        },
    }


def linked(client: Any, listing: str, below: str, *, last: bool = False) -> str:
    """Return the first or last address below ``below`` to which a list links."""
    text = client.get(listing).raise_for_status().text
    part = text.rpartition(f'href="{below}')[2] if last else text.split(f'href="{below}', 1)[1]
    return html.unescape(below + part.split('"', 1)[0])


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
