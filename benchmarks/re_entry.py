"""``bridle bench re-entry``: recorded sessions of installed programs, re-entered at random turns.

A cell is a harness in one kind of sandbox, with one kind of session. Each session is recorded
through a real proxy, and re-entered at a turn drawn at random. The record of the new session
decides what became of it: it was *entered* if the recorded call's place was taken by a live one, or
*stopped* with its reason. A session that is neither went wrong in silence.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from bridle.bench.delegating_policy import DELEGATIONS, TASK, script
from bridle.bench.harness_cases import CASES
from bridle.bench.re_entry_results import Cell, Report
from bridle.bench.seeded_policy import Done, Kind, SeededPolicy, Work
from bridle.bench.shell_policy import train_bench_tokenizer
from bridle.engine.scripted import Script, ScriptedEngine
from bridle.harnesses.adapters.base import Adapter
from bridle.harnesses.adapters.mini_swe_agent import MiniSweAgent
from bridle.harnesses.client import Client, Origin
from bridle.harnesses.fleet import LocalFleet
from bridle.harnesses.rollout import Job, Rollout, RolloutResult, RolloutSettings
from bridle.harnesses.sandboxes.base import SandboxProvider
from bridle.harnesses.tasks.task import Task
from bridle.harnesses.verifiers import FunctionVerifier, RegexAnswer, Verifier
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.reconstruct.audit import audit_session
from bridle.reconstruct.session import LoadedSession
from bridle.run.agents import SANDBOXES
from bridle.store.reading.queries import CallRow, Reader
from bridle.store.records import CallKind, CallStatus

HARNESSES: Final = (
    "codex",
    "claude-code",
    "qwen-code",
    "pi",
    "opencode",
    "mini-swe-agent",
    "langchain-chat",
)
FORKED: Final = ("mini-swe-agent", "langchain-chat")
"""The harnesses that run in forked sandboxes."""
_DELEGATED: Final = frozenset({Kind.SUBAGENTS, Kind.COMPACTION})
_PACED: Final = _DELEGATED | {Kind.LONG, Kind.BACKGROUND}
"""The kinds whose recorded replies are sent at their recorded times, because work in the background
would otherwise be over at another turn."""


@dataclass(frozen=True, slots=True)
class Draw:
    """The number of sessions per cell, and the range of their turns."""

    sessions: int = 10
    least: int = 5
    most: int = 30
    seed: int = 0
    parallel: int = 2
    """Sessions that run at once."""
    timeout_s: float = 600.0

    @property
    def seeds(self) -> range:
        return range(self.seed, self.seed + self.sessions)


async def bench_re_entry(
    harnesses: Sequence[str],
    sandboxes: Sequence[str],
    kinds: Sequence[Kind],
    draw: Draw,
    report: Report,
    progress: Callable[[Cell], None] = lambda cell: None,
) -> None:
    """Record and re-enter the sessions that the report does not have, and add them to it.

    Sessions that cannot be are left out: ``forked`` sandboxes of harnesses that are not written in
    Python, and sub-agents of those that have none. Raise ``NotLaunchable`` if a harness is not
    installed.
    """
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
        train_bench_tokenizer(Path(folder, "model"))
        for harness, sandbox, kind in itertools.product(harnesses, sandboxes, kinds):
            if (sandbox == "forked" and harness not in FORKED) or (
                kind in _DELEGATED and harness not in DELEGATIONS
            ):
                continue
            seeds = report.missing(harness, sandbox, kind, draw.seeds)
            cells = [Cell(harness, sandbox, kind, seed) for seed in seeds]
            async for cell in _measured(cells, Path(folder), draw):
                report.add(cell)
                progress(cell)


async def _measured(cells: Sequence[Cell], folder: Path, draw: Draw) -> AsyncGenerator[Cell]:
    """Yield the sessions of one harness, sandbox and kind in the order in which they are over."""
    if not cells:
        return
    case = _case(cells[0].harness, cells[0].kind)
    fleet = LocalFleet(_sandboxes(case.adapter, cells[0].sandbox), case.verifier)
    slots = asyncio.Semaphore(draw.parallel)
    sessions = [
        asyncio.create_task(_session(cell, case, fleet, slots, folder, draw)) for cell in cells
    ]
    try:
        for session in asyncio.as_completed(sessions):
            yield await session
    finally:
        for session in sessions:
            session.cancel()
        await asyncio.gather(*sessions, return_exceptions=True)
        await fleet.close()


@dataclass(frozen=True, slots=True)
class _Case:
    """The parts of a harness's sessions of one kind: who plays the model, and who judges them."""

    adapter: Adapter
    policy: Callable[[], Script]
    verifier: Verifier


def _case(harness: str, kind: Kind) -> _Case:
    if kind not in _DELEGATED:
        return _Case(CASES[harness].adapter(), SeededPolicy, FunctionVerifier(Done()))
    case = DELEGATIONS[harness]
    return _Case(case.adapter, lambda: script(case), RegexAnswer("well"))


def _task(cell: Cell, draw: Draw) -> Task:
    name = f"{cell.harness}-{cell.seed}"
    if cell.kind in _DELEGATED:
        return Task(name, TASK)
    return Work.drawn(cell.kind, cell.seed, draw.least, draw.most).task(name)


def _sandboxes(adapter: Adapter, kind: str) -> SandboxProvider:
    if kind == "forked" and isinstance(adapter, MiniSweAgent):
        return adapter.sandboxes()
    return SANDBOXES.get(kind)(adapter)


async def _session(
    cell: Cell, case: _Case, fleet: LocalFleet, slots: asyncio.Semaphore, folder: Path, draw: Draw
) -> Cell:
    """Record a session and re-enter it, with an engine and a proxy of its own."""
    own = folder / cell.harness / cell.sandbox / cell.kind / str(cell.seed)
    model, store = folder / "model", str(own / "bench.db")
    settings = RolloutSettings(
        own / "sessions", parallel=draw.parallel, timeout_s=draw.timeout_s, retries=0
    )
    async with slots:
        own.mkdir(parents=True)
        with (
            ScriptedEngine(model, case.policy(), max_model_len=1_000_000) as engine,
            ProxyServer(ProxySettings(engine.base_url, store, tokenizer_dir=model)) as proxy,
            Reader(store) as reader,
        ):
            async with Client(proxy.base_url) as client:
                rollout = Rollout(client, case.adapter, fleet, settings)
                return await _re_entered(cell, rollout, _task(cell, draw), engine, reader)


async def _re_entered(
    cell: Cell, rollout: Rollout, task: Task, engine: ScriptedEngine, reader: Reader
) -> Cell:
    whole = await rollout.one(Job(task))
    if whole.session_id is None or not _is_done(whole):
        return replace(cell, problems=(f"not recorded: {_told(whole)}",))
    branch = _branch(cell.kind, task.id, LoadedSession.load(reader, whole.session_id).calls)
    if branch is None:
        return replace(cell, problems=(f"not re-entered: {task.id} has no turn for it",))
    rules = {"replay": {"pace": "recorded" if cell.kind in _PACED else "instant"}}
    before = len(engine.requests)
    again = await rollout.one(Job(task, None, rules, Origin(whole.session_id, branch.id)))
    cell = replace(
        cell,
        recorded=1,
        seconds=whole.seconds,
        seconds_again=again.seconds,
        asked=len(engine.requests) - before,
    )
    return _with_re_entry(cell, again, branch, reader)


def _branch(kind: Kind, name: str, calls: Sequence[CallRow]) -> CallRow | None:
    """Draw the call at which a session goes on live: complete work, but not the first."""
    work = (CallKind.MAIN, CallKind.UNKNOWN)
    able = [c for c in calls if c.status is CallStatus.COMPLETE and c.kind in work][1:]
    if kind in _DELEGATED:
        summary = next((c for c in calls if c.kind is CallKind.COMPACTION), calls[-1])
        after = kind is Kind.COMPACTION
        chosen = [c for c in able if (c.started_at > summary.started_at) is after]
        able = chosen or able[:1]
    return random.Random(name).choice(able) if able else None


def _with_re_entry(cell: Cell, result: RolloutResult, branch: CallRow, reader: Reader) -> Cell:
    """Return a recorded session's figures with those of its re-entry, which is over."""
    if result.session_id is None:
        return replace(cell, problems=(f"not re-entered: {_told(result)}",))
    calls = LoadedSession.load(reader, result.session_id).calls
    noted = {call.id: {note.name: note.detail for note in call.notes} for call in calls}
    diverged = [notes["replay_diverged"] for notes in noted.values() if "replay_diverged" in notes]
    live = [call for call in calls if call.replayed_call_id is None]
    sampled = [call for call in live if call.status in (CallStatus.COMPLETE, CallStatus.PARTIAL)]
    first = next((c for c in live if noted[c.id].get("replay_live") == branch.id), None)
    audited = audit_session(reader, result.session_id, bodies=True)
    tokens = sum(call.sampled_tokens or 0 for call in live)
    cell = replace(
        cell,
        replayed=len(calls) - len(live),
        asked=cell.asked - len(sampled),
        conserved=int(audited.clean and audited.conservation.captured == tokens),
    )
    if diverged:
        return replace(cell, stopped=(diverged[0],))
    if first is None or not _is_done(result):
        turns = f"{cell.replayed} turns replayed, {len(live)} live"
        return replace(cell, problems=(f"silent: {turns}; {_told(result)}",))
    was, now = (reader.prompt_token_ids(call.id) for call in (branch, first))
    equal = was is not None and now is not None and list(was) == list(now)
    return replace(cell, entered=1, equal=int(equal))


def _is_done(result: RolloutResult) -> bool:
    return result.scores.get("reward") == 1.0


def _told(result: RolloutResult) -> str:
    return f"{result.task_id}: {result.outcome}, {result.error or result.answer[-200:]!r}".strip()
