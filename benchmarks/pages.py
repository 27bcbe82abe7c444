"""The cost of a large store to its readers and its writer.

It measures the CPU time of every page, of searches, of findings and of an export of one session,
each in this process, and the CPU time of a call that is recorded in the large store against one
that is recorded in an empty store.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from fastapi.testclient import TestClient

from bridle.bench.corpus import corpus
from bridle.bench.large_store import fill_store
from bridle.bench.session import Agent, session_record
from bridle.bench.viewer import examples, linked
from bridle.diagnosis.findings import findings_of_run
from bridle.reconstruct.exports.formats import export
from bridle.reconstruct.exports.selection import Selection
from bridle.store.reading.queries import Reader
from bridle.store.schema.database import migrate
from bridle.store.writing.writer import Writer
from bridle.viewer.app import viewer_app
from bridle.viewer.rendering import Source

PAGE_MS: Final = 300.0
"""The bar for a page, in milliseconds of CPU."""
SEARCH_MS: Final = 500.0
"""The bar for a search."""
CALL_RATIO: Final = 1.2
"""The bar for a call, as a multiple of its CPU time in an empty store."""
SEARCHES: Final = ("lamp", "the", "return", "of the", "zzqzz", "grep", "con")
"""Rare and common texts, a phrase, one that is nowhere, and the beginning of many words."""
_WRITTEN: Final = 100
"""Calls that are recorded for each measurement of a call."""


def measure(
    store: str,
    calls: int,
    repeats: int = 3,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Return the milliseconds of CPU by page, search and action, and the ratio of a call's.

    ``store`` is filled with ``calls`` calls first if it is an SQLite file that does not exist yet,
    or a database without a store.
    """
    if _is_empty(store):
        say(f"Filling a store of {calls:,} calls.")
        fill_store(store, calls, say)
    with _client(store) as client, Reader(store) as reader:
        pages, searches = _addresses(client)
        report: dict[str, Any] = {"pages": {}, "searches": {}, "actions": {}}
        for kind, addresses in (("pages", pages), ("searches", searches)):
            for name, address in addresses.items():
                say(f"Reading {name}.")
                report[kind][name] = _cpu_ms(partial(_get, client, address), repeats)
        run, session = (pages[name].rpartition("/")[2] for name in ("run", "session"))
        say("Reading findings and an export.")
        report["actions"]["findings"] = _cpu_ms(lambda: findings_of_run(reader, run), repeats)
        report["actions"]["export --session"] = _cpu_ms(lambda: _export(reader, session), repeats)
    say("Recording calls.")
    report["call"] = measure_call(store)
    report["bars"] = {"pages": PAGE_MS, "searches": SEARCH_MS, "actions": PAGE_MS}
    return report


def _is_empty(store: str) -> bool:
    if "://" not in store and not Path(store).exists():
        return True
    migrate(store)
    with Reader(store) as reader:
        return next(iter(reader.sessions(limit=1)), None) is None


def over_bars(report: Mapping[str, Any]) -> list[str]:
    """Return the names of the figures that are above their bars."""
    slow = [
        name
        for kind, bar in report["bars"].items()
        for name, ms in report[kind].items()
        if ms > bar
    ]
    return slow + (["call"] if report["call"]["ratio"] > CALL_RATIO else [])


def measure_call(store: str, repeats: int = 5) -> dict[str, float]:
    """Return the milliseconds of CPU of a recorded call, in ``store`` and in an empty store.

    Sessions of the same calls are recorded in both in turn, and sealed. The smallest of the
    repeats counts.
    """
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
        empty = str(Path(folder) / "empty.db")
        migrate(empty)
        times: dict[str, list[float]] = {"large": [], "empty": []}
        with Writer(store) as large, Writer(empty) as small:
            for repeat in range(repeats):
                for name, writer in (("large", large), ("empty", small)):
                    times[name].append(_record(writer, repeat))
    own, other = min(times["large"]), min(times["empty"])
    return {"large_ms": own, "empty_ms": other, "ratio": round(own / other, 3)}


def _record(writer: Writer, seed: int) -> float:
    session = session_record(f"bench-call-{time.time_ns()}")
    writer.add_sync(session)
    calls = list(Agent(corpus(), session, seed=seed).calls(_WRITTEN))
    start = time.process_time()
    for call in calls:
        writer.begin_call(call.begun)
        writer.end_call_sync(call.ended)
    writer.update_session_sync(session.id, sealed_at=time.time(), outcome="completed")
    while writer.digesting:
        time.sleep(0.01)
    return round(1000 * (time.process_time() - start) / _WRITTEN, 4)


@contextmanager
def _client(store: str) -> Iterator[TestClient]:
    with Reader(store) as reader:
        yield TestClient(viewer_app(Source(reader, "bench")), follow_redirects=False)


def _addresses(client: TestClient) -> tuple[dict[str, str], dict[str, str]]:
    session, run, group = examples(client)
    smallest = linked(client, "/runs", "/runs/", last=True)
    pages = {
        "session": session,
        "run": run if run.endswith("0") else smallest,
        "sessions": "/sessions",
        "tree": f"{session}/tree",
        "session audit": f"{session}/audit",
        "turns": f"{session}/turns",
        "tokens": f"{session}/turns/3/tokens?observed=true",
        "diff": f"{session}/turns/3/diff",
        "groups": "/groups",
        "groups, page 40": "/groups?page=40",
        "group": group,
        "runs": "/runs",
        "audit": "/audit",
    }
    of = pages["run"]
    pages |= {
        "findings of the run": f"{of}/findings",
        "lanes of the run": f"{of}/lanes",
        "run compared": f"{of}?compare=run_bench1",
        "audit of the run": f"/audit?run={of.rpartition('/')[2]}",
        "groups of the run": f"/groups?run={of.rpartition('/')[2]}",
        "sessions of the run": f"/sessions?run={of.rpartition('/')[2]}",
        **{f"by {order}": f"/sessions?order={order}" for order in
           ("task", "harness", "outcome", "reward", "calls", "breaks", "tokens", "version",
            "duration", "newest&reverse=true", "reward&reverse=true", "calls&reverse=true")},
        "page 400": "/sessions?page=400",
        "model filter": "/sessions?model=policy",
        "model nowhere": "/sessions?model=a-model",
        "cost filter": "/sessions?sampled_least=100&sampled_most=2000",
        "cost nowhere": "/sessions?sampled_least=1000000000",
        "days": "/sessions?since=2026-09-01&until=2026-09-30",
        "break filter": "/sessions?broke=any",
        "reason of a break": "/sessions?broke=edited",
        "kind filter": "/sessions?kind=compaction",
        "status filter": "/sessions?status=failed",
        "status nowhere": "/sessions?status=quarantined",
        "version filter": "/sessions?version=3",
        "version nowhere": "/sessions?version=99",
        "fate filter": "/sessions?fate=masked",
        "reward filter": "/sessions?reward=tests&least=0.5",
    }  # fmt: skip
    searches = {f"search {text!r}": f"/sessions?text={text}" for text in SEARCHES}
    searches |= {
        "search, oldest": "/sessions?text=lamp&order=newest&reverse=true",
        "search, by tokens": "/sessions?text=return&order=tokens",
        "search in a run": f"/sessions?text=the&run={of.rpartition('/')[2]}",
        "audit of a text": "/audit?text=lamp",
        "groups of a text": "/groups?text=lamp",
    }
    return pages, searches


def _get(client: TestClient, address: str) -> str:
    reply = client.get(address)
    assert reply.status_code == 200, f"{address}: {reply.status_code}"
    return reply.text


def _export(reader: Reader, session: str) -> None:
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
        export(reader, Path(folder) / "out.jsonl", "chat", Selection(sessions=(session,)), "tree")


def _cpu_ms(action: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.process_time()
        action()
        times.append(1000 * (time.process_time() - start))
    return round(median(times), 1)
