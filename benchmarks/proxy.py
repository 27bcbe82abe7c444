"""``bridle bench proxy``: recorded calls per second, added latency, streams and memory.

Every part is a process of its own: the proxy alone on one core, engine and load together on
another. Direct calls, proxied calls and the *floor* (``bridle/bench/passthrough.py``: uvicorn and
aiohttp, no recording) are measured in turns within every run, because machines drift; figures are
medians over the runs. Recording is on, into SQLite (WAL, ``synchronous=NORMAL``; a second proxy
shows ``FULL`` beside it). Afterwards, the contents of the store are compared with the clients'
replies.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import orjson

from bridle.bench.load import Load, Measured
from bridle.bench.upstream import CHUNK_INTERVAL_S, CHUNKS, LARGE, SMALL, STREAM
from bridle.store.reading.queries import Reader
from bridle.store.records import CallStatus

_START_S: Final = 30.0
RECOMMENDED_ALLOCATOR: Final = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": "4194304",
    "MALLOC_MMAP_THRESHOLD_": "4194304",
}
"""The environment variables that docs/deploy.md recommends for the process of a proxy."""
_CONCURRENT: Final = (1, 16, 64)
_STREAMS: Final = (64, 256)

DIRECT: Final = "direct"
PROXIED: Final = "bridle"
FLOOR: Final = "floor"
FULL: Final = "full"
_FULL_CASE: Final = "c1"
"""The case in which a commit that waits for the disk shows."""


@dataclass(frozen=True)
class Case:
    """One kind of load."""

    name: str
    model: str
    concurrency: int
    request_bytes: int
    stream: bool = False
    ramp_s: float = 0.0


CASES: Final = (
    *(Case(f"c{count}", SMALL, count, 1024) for count in _CONCURRENT),
    Case("large", LARGE, 8, 223 * 1024),
    *(
        Case(f"s{count}", STREAM, count, 1024, stream=True, ramp_s=CHUNKS * CHUNK_INTERVAL_S)
        for count in _STREAMS
    ),
    *(Case(f"burst{count}", STREAM, count, 1024, stream=True) for count in _STREAMS),
)
"""The cases. Streams begin evenly spread over the length of one stream, as they do in use. The
streams of a ``burst`` all begin at the same moment, so their time to the first chunk is a queue for
the processor."""


@dataclass
class Figures:
    """All measurements of one target: one value per run for each case."""

    calls_per_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    first_ms: dict[str, list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    whole_ms: dict[str, list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    lost: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    cpu_ms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Milliseconds of processor time per call, all threads of the process."""

    def take(self, case: str, measured: Measured) -> None:
        self.lost[case] += measured.failed
        if not measured.calls:
            return
        self.calls_per_s[case].append(measured.calls / measured.seconds)
        self.first_ms[case].append(measured.first)
        self.whole_ms[case].append(measured.whole)


def measure(
    *,
    runs: int,
    seconds: float,
    cases: Sequence[Case] = CASES,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Return the report. Raise ``RuntimeError`` if a process does not start."""
    proxy_core, load_core = cores()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bridle-bench-")))
        engine_url = stack.enter_context(upstream_process(load_core))
        start = partial(proxy_process, engine_url, core=proxy_core)
        proxy, proxy_url = stack.enter_context(start(recording_proxy(folder / "bench.db")))
        _, full_url = stack.enter_context(start(recording_proxy(folder / "full.db", "FULL")))
        floor, floor_url = stack.enter_context(start(["bridle.bench.passthrough"]))
        processes = {PROXIED: proxy, FLOOR: floor}
        urls = {
            DIRECT: f"{engine_url}/v1",
            FLOOR: f"{floor_url}/v1",
            PROXIED: f"{proxy_url}/s/{{session}}/v1",
            FULL: f"{full_url}/s/{{session}}/v1",
        }
        figures = {target: Figures() for target in urls}
        for run in range(runs):
            for case in cases:
                for target, url in urls.items():
                    if target == FULL and case.name != _FULL_CASE:
                        continue
                    progress(f"run {run + 1} of {runs}: {case.name}, {target}")
                    load = _load(case, url, seconds, f"{case.name}-{run}")
                    process = processes.get(target)
                    before = 0.0 if process is None else cpu_seconds(process.pid)
                    measured = ask(load, load_core)
                    figures[target].take(case.name, measured)
                    if not measured.calls:
                        continue
                    if process is not None:
                        used = cpu_seconds(process.pid) - before
                        figures[target].cpu_ms[case.name].append(1000 * used / measured.calls)
                    if target == PROXIED:
                        held = _recorded(folder / "bench.db", load, measured)
                        figures[target].lost[case.name] += measured.calls - held
        rss = rss_mb(proxy.pid)
    direct, bare, full = (figures.pop(name) for name in (DIRECT, FLOOR, FULL))
    report = _report(figures.pop(PROXIED), direct, cases) | {"rss_mb": round(rss, 1)}
    report["direct"] = {"calls_per_s": _medians(direct.calls_per_s)}
    report["floor"] = _report(bare, direct, cases)
    report["floor_ratio"] = _ratios(report["calls_per_s"], report["floor"]["calls_per_s"])
    report["full"] = {"added_ms": _report(full, direct, cases)["added_ms"]}
    return report


def added_meanwhile(
    store: Path, case: Case, runs: int, seconds: float, meanwhile: Callable[[str], object]
) -> dict[str, tuple[float | None, float | None]]:
    """Return the milliseconds that a recording proxy adds to p50 and p99 of ``case``.

    The proxy records into ``store``. ``meanwhile`` is called again and again with its URL, below
    which its viewer is. The engine alone and the proxy without ``meanwhile`` are measured in
    between. ``to_engine`` is added to calls of the engine, ``to_proxy`` to those of the undisturbed
    proxy. Raise ``RuntimeError`` if a call fails.
    """
    proxy_core, load_core = cores()
    direct, alone, proxied = Figures(), Figures(), Figures()
    with (
        upstream_process(load_core) as engine,
        proxy_process(engine, [*recording_proxy(store), "--viewer"], core=proxy_core) as (_, url),
    ):
        for run in range(runs):
            name = f"{case.name}-{run}"
            direct.take(case.name, ask(_load(case, f"{engine}/v1", seconds, name), load_core))
            for figures, beside in (
                (alone, nullcontext()),
                (proxied, _repeated(partial(meanwhile, url))),
            ):
                unique = f"{name}-{time.time_ns()}"
                load = _load(case, f"{url}/s/{{session}}/v1", seconds, unique)
                with beside:
                    measured = ask(load, load_core)
                if measured.failed:
                    raise RuntimeError(f"{measured.failed} calls of {case.name} failed")
                figures.take(case.name, measured)
    own = proxied.whole_ms[case.name]
    return {
        "to_engine": _added(own, direct.whole_ms[case.name]),
        "to_proxy": _added(own, alone.whole_ms[case.name]),
    }


@contextmanager
def _repeated(work: Callable[[], object]) -> Iterator[None]:
    """Call ``work`` repeatedly in a thread until the context is left, and raise what it raised."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            work()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        try:
            yield
        finally:
            over.set()
    running.result()


def _report(own: Figures, direct: Figures, cases: Sequence[Case]) -> dict[str, Any]:
    cases = [case for case in cases if own.calls_per_s.get(case.name)]
    plain = [case.name for case in cases if case.model == SMALL]
    streams = [case.name for case in cases if case.stream]
    report: dict[str, Any] = {
        "calls_per_s": {name: _median(own.calls_per_s[name]) for name in plain},
        "added_ms": {
            name: dict(
                zip(("p50", "p99"), _added(own.whole_ms[name], direct.whole_ms[name]), strict=True)
            )
            for name in plain
        },
        "stream": {name: _stream(own, direct, name) for name in streams if name[0] == "s"},
        "burst": {name: _stream(own, direct, name) for name in streams if name[0] == "b"},
        "lost": sum(own.lost.values()),
    }
    if any(case.model == LARGE for case in cases):
        report["large"] = {"calls_per_s": _median(own.calls_per_s["large"])}
    if own.cpu_ms:
        report["cpu_ms_per_call"] = {
            name: round(_median(values) or 0.0, 3) for name, values in own.cpu_ms.items()
        }
    return report


def _stream(own: Figures, direct: Figures, name: str) -> dict[str, Any]:
    p50, p99 = _added(own.first_ms[name], direct.first_ms[name])
    ratios = [
        mine[0] / bare[0]
        for mine, bare in zip(own.whole_ms[name], direct.whole_ms[name], strict=False)
    ]
    return {
        "added_ttft_p50_ms": p50,
        "added_ttft_p99_ms": p99,
        "whole_ratio": None if not ratios else round(statistics.median(ratios), 4),
        "lost": own.lost[name],
    }


def _added(
    own: Sequence[tuple[float, float]], direct: Sequence[tuple[float, float]]
) -> tuple[float | None, float | None]:
    """Return the medians over the runs of what a proxy adds to p50 and p99.

    Each run is compared with its own direct calls.
    """
    pairs = list(zip(own, direct, strict=False))
    if not pairs:
        return None, None
    p50 = statistics.median(mine[0] - bare[0] for mine, bare in pairs)
    p99 = statistics.median(mine[1] - bare[1] for mine, bare in pairs)
    return round(p50, 3), round(p99, 3)


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None


def _medians(values: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
    return {name: _median(found) for name, found in values.items()}


def _ratios(own: Mapping[str, float | None], floor: Mapping[str, float | None]) -> dict[str, float]:
    """Return Bridle's calls per second divided by the floor's, for the cases that both answered."""
    return {
        name: round(value / bare, 3)
        for name, value in own.items()
        if value and (bare := floor.get(name))
    }


def _load(case: Case, url: str, seconds: float, name: str) -> Load:
    return Load(
        url=url,
        model=case.model,
        concurrency=case.concurrency,
        request_bytes=case.request_bytes,
        name=f"bench-{name}",
        seconds=0.0 if case.stream else seconds,
        calls=max(1, round(seconds)),
        stream=case.stream,
        ramp_s=case.ramp_s,
    )


def ask(load: Load, core: int | None) -> Measured:
    """Lead a load in a process of its own, pinned to ``core``, and return what it measured."""
    done = subprocess.run(
        [sys.executable, "-m", "bridle.bench.load"],
        input=orjson.dumps(asdict(load)),
        stdout=subprocess.PIPE,
        check=True,
        preexec_fn=pinned(core),
    )
    return Measured(**orjson.loads(done.stdout))


def _recorded(store: Path, load: Load, measured: Measured) -> int:
    """Return the number of the load's calls that are complete in the store, token ids included."""
    expected = CHUNKS if load.stream else 1
    held = 0
    reader = Reader(str(store))
    try:
        for session in reader.sessions(newest_first=True, limit=measured.calls + load.concurrency):
            if (session.name or "").startswith(f"{load.name}-"):
                held += sum(
                    call.status is CallStatus.COMPLETE and (call.sampled_tokens or 0) >= expected
                    for call in reader.calls(session.id)
                )
    finally:
        reader.close()
    return held


@contextmanager
def upstream_process(core: int | None) -> Iterator[str]:
    """Run the engine of ``bridle/bench/upstream.py``, and yield its URL."""
    command = [sys.executable, "-m", "bridle.bench.upstream"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        preexec_fn=pinned(core),
    )
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        _end(process)


def recording_proxy(store: Path, synchronous: str = "NORMAL") -> list[str]:
    """Return the module and arguments with which :func:`proxy_process` runs Bridle's own proxy."""
    return ["bridle", "proxy", "--store", str(store), "--set", f"synchronous={synchronous}"]


@contextmanager
def proxy_process(
    engine_url: str, module: list[str], core: int | None
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run ``python -m`` with the words of ``module`` as a proxy in front of the engine.

    Yield the process and its URL.
    """
    port = free_port()
    command = [sys.executable, "-m", *module, "--upstream", engine_url, "--port", str(port)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **RECOMMENDED_ALLOCATOR},
        preexec_fn=pinned(core),
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(f"{url}/healthz", process)
        yield process, url
    finally:
        _end(process)


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=1):  # noqa: S310 - our own loopback
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise RuntimeError(f"the proxy to be measured did not start at {url}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def cores() -> tuple[int | None, int | None]:
    """Return the core of the proxy and that of the others.

    Both are ``None`` if there is no choice.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None, None
    cores = sorted(os.sched_getaffinity(0))
    return (cores[0], cores[1]) if len(cores) > 1 else (None, None)


def pinned(core: int | None) -> Callable[[], None] | None:
    return None if core is None else lambda: os.sched_setaffinity(0, {core})


def cpu_seconds(pid: int) -> float:
    """Return the processor seconds of a process so far, or 0 if there is no ``/proc``.

    All threads are counted.
    """
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return 0.0
    fields = stat.read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    """Return the resident memory of a process in MiB, or 0 if there is no ``/proc``."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return 0.0
    (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024
