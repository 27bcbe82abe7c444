"""``bridle bench proxy --workers N``: calls per second of several processes behind one port.

One process and ``N`` record into the same store in turns, and share all cores with the engine, the
load and the database server, as on one machine. What the cores were busy with meanwhile says what
bounds a figure: the processor if hardly any time was idle, else the store.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any, Final

from bridle.bench.load import Load
from bridle.bench.proxy import ask, proxy_process, upstream_process
from bridle.bench.upstream import SMALL

_CONCURRENT: Final = (16, 64)
_REQUEST_BYTES: Final = 1024
_WARM_S: Final = 2.0
"""Seconds of the first load, which is not counted: processes start meanwhile."""
_CORES: Final = os.cpu_count() or 1


def measure_workers(
    count: int,
    store: str,
    *,
    runs: int,
    seconds: float,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Return calls per second, busy cores and failed calls by number of clients and of processes.

    ``store`` is a file or a database URL. Raise ``RuntimeError`` if a process does not start.
    """
    rates: dict[str, list[float]] = defaultdict(list)
    busy: dict[str, list[float]] = defaultdict(list)
    failed = 0
    with ExitStack() as stack:
        engine = stack.enter_context(upstream_process(None))
        urls = {}
        for processes in (1, count):
            command = ["bridle", "proxy", "--store", store, "--workers", str(processes)]
            _, urls[processes] = stack.enter_context(proxy_process(engine, command, None))
        for run in range(runs + 1):
            for clients, (processes, url) in product(_CONCURRENT, urls.items()):
                progress(f"run {run} of {runs}: {clients} clients, {processes} processes")
                load = Load(
                    url=f"{url}/s/{{session}}/v1",
                    model=SMALL,
                    concurrency=clients,
                    request_bytes=_REQUEST_BYTES,
                    name=f"workers-{processes}-{time.time_ns()}",
                    seconds=seconds if run else _WARM_S,
                )
                idle = _idle_seconds()
                measured = ask(load, None)
                idle = _idle_seconds() - idle
                failed += measured.failed
                if run:
                    case = f"c{clients}.{processes}"
                    rates[case].append(measured.calls / measured.seconds)
                    busy[case].append(_CORES - idle / measured.seconds)
    ratios = {
        f"c{clients}": [
            many / one
            for one, many in zip(rates[f"c{clients}.1"], rates[f"c{clients}.{count}"], strict=True)
        ]
        for clients in _CONCURRENT
    }
    return {
        "cores": _CORES,
        "calls_per_s": _medians(rates),
        "ratio": _medians(ratios),
        "busy_cores": _medians(busy),
        "failed": failed,
    }


def _medians(values: Mapping[str, list[float]]) -> dict[str, float]:
    return {case: round(statistics.median(each), 2) for case, each in values.items()}


def _idle_seconds() -> float:
    """Return the seconds since the machine's start for which its cores did nothing, summed."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")
