"""Rounds in which every arm leads the same sessions in its turn, and what its record then holds."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

import orjson

from bridle.bench.proxy import pinned
from bridle.bench.rivals.aiperf_load import AiperfFailed, aiperf_version
from bridle.bench.rivals.aiperf_load import lead as lead_with_aiperf
from bridle.bench.rivals.arms import (
    DIRECT,
    INSTALL,
    PLAIN,
    PRIMED,
    Arm,
    ArmFailed,
    Place,
    Running,
    place_of,
    recorded_calls,
    running,
)
from bridle.bench.rivals.engine import MODEL, sampled_ids
from bridle.bench.rivals.model import long_policy
from bridle.bench.rivals.sessions import SessionLoad, SessionTimes, source_texts
from bridle.run.stack import engine_service

_CHARACTERS: Final = 4
"""Characters of source code for each token, about."""
_RSS_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Workload:
    """The sessions of one load; lengths in tokens."""

    name: str
    concurrency: int
    sessions: int
    """Number of sessions per connection and round."""
    turns: int
    opening: int
    growth: int
    """Tokens of a tool's result."""
    reply: int

    def scaled(self, scale: float) -> Workload:
        """Return the workload with its prompts and replies at ``scale``, and as many turns."""
        return Workload(
            self.name,
            self.concurrency,
            self.sessions,
            self.turns,
            opening=max(16, round(self.opening * scale)),
            growth=max(8, round(self.growth * scale)),
            reply=max(8, round(self.reply * scale)),
        )


RECORDED: Final = (
    Workload("agent", 8, 1, 31, opening=30_000, growth=4142, reply=458),
    *(Workload(f"chat{count}", count, 4, 1, 1000, 0, 128) for count in (16, 64, 128)),
)
"""``agent`` has the shape of recorded coding agents: 31 turns with the whole history in each, whose
median request is of 99,000 tokens and whose reply is of 458."""
LONG: Final = tuple(
    Workload(f"long{count}", count, 1, 31, opening=100_000, growth=256, reply=32)
    for count in (1, 8)
)
"""Sessions of as many turns as those of ``agent``. They begin with 100,000 tokens and grow little,
as late turns of agents do. An engine's prefix cache leaves it only what a request costs beside the
model."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The engine, the loads and the arms of a measurement."""

    engine: Literal["scripted", "vllm"]
    workloads: Sequence[Workload]
    arms: Sequence[Arm]
    rounds: int
    gap_ms: float
    model: Path | None = None
    """The model's directory; ``None`` for the engine's own small one."""
    client: Literal["own", "aiperf"] = "own"
    """The program that leads the sessions: ``sessions`` or AIPerf."""


@dataclass
class _Figures:
    """The measurements of an arm, one value for each round."""

    times: list[SessionTimes] = field(default_factory=list)
    rss_mb: float = 0.0
    recorded: int = 0
    keeps_record: bool = True


def measure(plan: Plan, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Return the report. An arm that does not start is ``unstarted``, with its log's end."""
    present = [arm for arm in plan.arms if arm.installed]
    report: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%d %B %Y"),
        "machine": {"cores": os.cpu_count(), "processor": platform.machine()},
        "python": platform.python_version(),
        "engine": plan.engine,
        "client": plan.client,
        "client_version": aiperf_version() if plan.client == "aiperf" else "",
        "model": None if plan.model is None else plan.model.name,
        "gap_ms": plan.gap_ms,
        "rounds": plan.rounds,
        "arms": {arm.name: {"what": arm.what, "version": arm.version()} for arm in present},
        "missing": {a.name: f"{INSTALL} {a.name}" for a in plan.arms if not a.installed},
        "workloads": {},
    }
    with tempfile.TemporaryDirectory(prefix="bridle-rivals-") as name, ExitStack() as stack:
        folder = Path(name)
        on_vllm = plan.engine == "vllm"
        model = plan.model or (long_policy() if on_vllm else _tokenizer(folder / "model"))
        engines: Mapping[str, str] | None = None
        if on_vllm:
            progress("vLLM starts")
            names = {arm.engine for arm in present}
            engines = stack.enter_context(_vllm_engines(model, folder, _cores()[1], names))
        for workload in plan.workloads:
            own = folder / workload.name
            found = _measure_workload(plan, workload, present, model, own, engines, progress)
            report["workloads"][workload.name] = {**asdict(workload), **found}
    return report


def _measure_workload(
    plan: Plan,
    workload: Workload,
    arms: Sequence[Arm],
    model: Path,
    folder: Path,
    engines: Mapping[str, str] | None,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Return the figures of one load. Without ``engines``, a scripted one is behind all arms."""
    proxy_core, engine_core, load_core = _cores()
    figures = {arm.name: _Figures(keeps_record=arm.recorded is not None) for arm in arms}
    places: dict[str, Place] = {}
    unstarted: dict[str, str] = {}
    with ExitStack() as stack:
        if engines is None:
            url = stack.enter_context(_scripted(model, workload.reply, plan.gap_ms, engine_core))
            engines = dict.fromkeys((PLAIN, PRIMED), url)
        serving: dict[str, Running] = {}
        for arm in arms:
            progress(f"{workload.name}: {arm.name} starts")
            place = places[arm.name] = place_of(arm, engines[arm.engine], MODEL, model, folder)
            try:
                served = stack.enter_context(running(arm, place, pinned(proxy_core)))
            except ArmFailed as failure:
                unstarted[arm.name] = str(failure)
                continue
            serving[arm.name] = served
            # The first calls of a process load what later ones find loaded.
            warming = _load(workload, serving[arm.name], f"warm-{arm.name}", plan)
            _lead(replace(warming, concurrency=1, sessions=1, turns=2), load_core)
        arms = [arm for arm in arms if arm.name in serving]
        for number in range(plan.rounds):
            for arm in _rotated(arms, number):
                progress(f"{workload.name}, round {number + 1} of {plan.rounds}: {arm.name}")
                name = f"{workload.name}-{number}-{arm.name}"
                with _watched(serving[arm.name]):
                    times = _lead_all(workload, serving[arm.name], name, load_core, plan, folder)
                figures[arm.name].times.append(times)
        for arm in arms:
            figures[arm.name].rss_mb = serving[arm.name].peak_rss_mb
    for arm in arms:
        progress(f"{workload.name}: reading the record of {arm.name}")
        exact = _is_exact if plan.engine == "scripted" else _has_ids
        calls = recorded_calls(arm, places[arm.name])
        figures[arm.name].recorded = sum(exact(*call, workload.reply) for call in calls)
    return {
        "input_tokens": [
            round(1000 * size / _CHARACTERS) for size in figures[arms[0].name].times[0].body_kb
        ],
        "arms": {name: _report(own, figures[DIRECT]) for name, own in figures.items() if own.times},
        "unstarted": unstarted,
    }


def _is_exact(number: int | None, ids: Sequence[int], tokens: int) -> bool:
    """Return whether the ids are those that the scripted engine sampled."""
    if number is None or len(ids) != tokens:
        return False
    return list(ids[:-1]) == sampled_ids(number, tokens - 1)


def _has_ids(number: int | None, ids: Sequence[int], tokens: int) -> bool:
    """Return whether a call has as many ids as vLLM was asked for."""
    return len(ids) == tokens


def _rotated(arms: Sequence[Arm], number: int) -> list[Arm]:
    """Return the arms in the order of a round, so that none is always the first."""
    at = number % len(arms)
    return [*arms[at:], *arms[:at]]


@contextmanager
def _vllm_engines(
    model: Path, folder: Path, core: int | None, names: set[str]
) -> Iterator[Mapping[str, str]]:
    """Run the vLLMs that arms name on one core, and yield the base URL of each."""
    with ExitStack() as stack:
        urls = {}
        for name in sorted(names):
            priming = f"prime_with_tail={'true' if name == PRIMED else 'false'}"
            options = ["--set", priming, "--set", "cpu_kv_cache_gib=1"]
            service = engine_service("vllm", model, folder / f"engine-{name}", options)
            with _on_core(core):
                urls[name] = stack.enter_context(service).url
        yield urls


@contextmanager
def _on_core(core: int | None) -> Iterator[None]:
    """Start processes of the context on one core; they keep it."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def _scripted(model: Path, tokens: int, gap_ms: float, core: int | None) -> Iterator[str]:
    command = [sys.executable, "-m", "bridle.bench.rivals.engine", str(model), str(tokens)]
    process = subprocess.Popen(
        [*command, str(gap_ms)], stdout=subprocess.PIPE, preexec_fn=pinned(core)
    )
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


def _tokenizer(directory: Path) -> Path:
    from bridle.recipes.models.tiny_tokenizer import train_tokenizer

    train_tokenizer(directory, source_texts()[::8], vocab_size=8192)
    return directory


def _lead_all(
    workload: Workload, target: Running, name: str, core: int | None, plan: Plan, folder: Path
) -> SessionTimes:
    """Lead the workload's sessions with the plan's client."""
    load = _load(workload, target, name, plan)
    if plan.client == "own":
        return _lead(load, core)
    try:
        # Its tokenizer counts nothing here, and the genuine one is in a form that it can read.
        return lead_with_aiperf(load, plan.model or long_policy(), folder / name, pinned(core))
    except AiperfFailed as failure:
        return SessionTimes(
            failed=load.concurrency * load.sessions * load.turns, error=f"{failure}"
        )


def _load(workload: Workload, target: Running, name: str, plan: Plan) -> SessionLoad:
    fields = {"max_tokens": workload.reply}
    return SessionLoad(
        url=target.url,
        model=MODEL,
        name=name,
        concurrency=workload.concurrency,
        sessions=workload.sessions,
        turns=workload.turns,
        opening=workload.opening * _CHARACTERS,
        growth=workload.growth * _CHARACTERS,
        fields=fields if plan.engine == "scripted" else {**fields, "ignore_eos": True},
    )


def _lead(load: SessionLoad, core: int | None) -> SessionTimes:
    done = subprocess.run(
        [sys.executable, "-m", "bridle.bench.rivals.sessions"],
        input=orjson.dumps(asdict(load)),
        stdout=subprocess.PIPE,
        check=True,
        preexec_fn=pinned(core),
    )
    return SessionTimes(**orjson.loads(done.stdout))


@contextmanager
def _watched(target: Running) -> Iterator[None]:
    """Note the largest memory of a target during the context."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_RSS_S):
            target.take_rss()

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()
        target.take_rss()


def _cores() -> tuple[int | None, int | None, int | None]:
    """Return the cores of the proxies, the engine and the load.

    The last two share one if there are only two, and none is chosen if there is one.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        return None, None, None
    return cores[0], cores[1], cores[min(2, len(cores) - 1)]


def _report(own: _Figures, direct: _Figures) -> dict[str, Any]:
    """Return the figures of an arm, compared with the direct calls of the same rounds."""
    pairs = [
        (mine, bare)
        for mine, bare in zip(own.times, direct.times, strict=True)
        if mine.calls and bare.calls
    ]
    kept = [_rate(mine) / _rate(bare) for mine, bare in pairs]
    # The two calls that warm up are in the record as well.
    calls = 2 + sum(times.calls for times in own.times)
    found: dict[str, Any] = {
        "calls": calls,
        "failed": sum(times.failed for times in own.times),
        "error": next((times.error for times in own.times if times.error), ""),
        "requests_per_s": [round(_rate(times), 3) for times in own.times],
        "rss_mb": round(own.rss_mb, 1),
        "keeps_record": own.keeps_record,
        "recorded_exactly": round(own.recorded / calls, 4),
    }
    if kept:
        found["throughput_kept"] = [
            round(value, 4) for value in (statistics.median(kept), min(kept), max(kept))
        ]
        found["first_ratio"] = round(
            statistics.median(mine.first_ms[0] / bare.first_ms[0] for mine, bare in pairs), 4
        )
        for name in ("first_ms", "between_ms"):
            found[name] = _medians([getattr(mine, name) for mine, _ in pairs])
            found[f"added_{name}"] = _medians(
                [
                    (mine[0] - bare[0], mine[1] - bare[1])
                    for mine, bare in ((getattr(a, name), getattr(b, name)) for a, b in pairs)
                ]
            )
    return found


def _rate(times: SessionTimes) -> float:
    return times.calls / times.seconds if times.seconds else 0.0


def _medians(pairs: Sequence[Sequence[float]]) -> list[float]:
    """Return the medians of the 50th and of the 99th percentiles."""
    return [round(statistics.median(values), 3) for values in zip(*pairs, strict=True)]
