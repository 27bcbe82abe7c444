"""``bridle bench re-entry``: recorded sessions of installed programs, re-entered at random turns.

A cell is a harness in one kind of sandbox, with one kind of session. Its sessions of 5 to 30 turns
are recorded through the real proxy, and each is re-entered at a turn drawn at random. The record of
the new session decides what became of it: it was *entered* if the recorded call's place was taken
by a live one, or *stopped* with its reason. A session that is neither went wrong in silence.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from bridle.bench.delegating_policy import DELEGATIONS, TASK, script
from bridle.bench.harness_cases import CASES
from bridle.bench.seeded_policy import Done, Kind, SeededPolicy, Work
from bridle.bench.shell_policy import train_bench_tokenizer
from bridle.engine.scripted import ScriptedEngine, ScriptedReply, ScriptedRequest
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
ENTERED: Final = 0.95
"""The share of the sessions of foreground work that must be re-entered."""
FORKED: Final = ("mini-swe-agent", "langchain-chat")
"""The harnesses that run in forked sandboxes."""
_DELEGATED: Final = frozenset({Kind.SUBAGENTS, Kind.COMPACTION})
_PACED: Final = _DELEGATED | {Kind.LONG, Kind.BACKGROUND}
"""The kinds whose recorded replies are sent at their recorded times, because work in the background
would otherwise be over at another turn."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The sums over the re-entries of a harness in a kind of sandbox."""

    harness: str
    sandbox: str
    kind: Kind
    recorded: int = 0
    """Sessions that were recorded whole."""
    entered: int = 0
    equal: int = 0
    """Sessions whose first live prompt has the ids of the recorded call's prompt."""
    replayed: int = 0
    """Turns that were answered from the record."""
    asked: int = 0
    """Requests to the engine beyond those of the live calls."""
    conserved: int = 0
    """Sessions with a clean audit, whose captured tokens are those of the live calls."""
    seconds: float = 0.0
    seconds_again: float = 0.0
    noise: Mapping[str, int] = field(default_factory=dict)
    """Replayed turns by the rules of noise that they needed."""
    stopped: tuple[str, ...] = ()
    """The reasons of the sessions that stopped."""
    problems: tuple[str, ...] = ()
    """Sessions that could not be recorded, or went wrong in silence."""

    def failures(self) -> list[str]:
        """Return one line for each requirement that fails."""
        name = f"{self.harness} in {self.sandbox} ({self.kind})"
        found = [f"{name}: {problem}" for problem in self.problems]
        if self.equal != self.entered:
            found.append(f"{name}: {self.entered - self.equal} first live prompts differ")
        if self.asked:
            found.append(f"{name}: {self.asked} engine calls for replayed turns")
        if self.conserved != self.recorded:
            found.append(f"{name}: {self.recorded - self.conserved} sessions lost tokens")
        return found


@dataclass(slots=True)
class Report:
    seed: int
    cells: list[Cell] = field(default_factory=list)

    def failures(self) -> list[str]:
        """Return one line for each requirement that fails."""
        found = [failure for cell in self.cells for failure in cell.failures()]
        work = [cell for cell in self.cells if cell.kind is Kind.WORK]
        entered, recorded = sum(c.entered for c in work), sum(c.recorded for c in work)
        if entered < ENTERED * recorded:
            found.append(f"{entered} of {recorded} sessions of foreground work were re-entered")
        return found

    def as_data(self) -> dict[str, Any]:
        return {"seed": self.seed, "cells": [asdict(cell) for cell in self.cells]}


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


async def bench_re_entry(
    harnesses: Sequence[str],
    sandboxes: Sequence[str],
    kinds: Sequence[Kind],
    draw: Draw,
    progress: Callable[[Cell], None] = lambda cell: None,
) -> Report:
    """Record and re-enter the sessions of each cell.

    Cells that cannot be are left out: ``forked`` sandboxes of harnesses that are not written in
    Python, and sub-agents of those that have none. Raise ``NotLaunchable`` if a harness is not
    installed.
    """
    report = Report(draw.seed)
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
        train_bench_tokenizer(Path(folder, "model"))
        for harness, sandbox, kind in itertools.product(harnesses, sandboxes, kinds):
            if (sandbox == "forked" and harness not in FORKED) or (
                kind in _DELEGATED and harness not in DELEGATIONS
            ):
                continue
            cell = await _cell(Cell(harness, sandbox, kind), Path(folder), draw)
            report.cells.append(cell)
            progress(cell)
    return report


@dataclass(frozen=True, slots=True)
class _Play:
    """The sessions of a cell: what runs, who plays the model, and how the result is judged."""

    adapter: Adapter
    script: Callable[[ScriptedRequest], ScriptedReply]
    verifier: Verifier
    tasks: Mapping[str, Task]


def _play(cell: Cell, draw: Draw) -> _Play:
    seeds = range(draw.seed, draw.seed + draw.sessions)
    if cell.kind in _DELEGATED:
        case = DELEGATIONS[cell.harness]
        named = {f"{cell.harness}-{seed}": Task(f"{cell.harness}-{seed}", TASK) for seed in seeds}
        return _Play(case.adapter, script(case), RegexAnswer("well"), named)
    works = {f"{cell.harness}-{s}": Work.drawn(cell.kind, s, draw.least, draw.most) for s in seeds}
    tasks = {name: work.task(name) for name, work in works.items()}
    adapter = CASES[cell.harness].adapter()
    return _Play(adapter, SeededPolicy(), FunctionVerifier(Done()), tasks)


async def _cell(cell: Cell, folder: Path, draw: Draw) -> Cell:
    """Record the sessions of a cell, re-enter them, and return their sums."""
    play = _play(cell, draw)
    own = folder / cell.harness / cell.sandbox / cell.kind
    own.mkdir(parents=True)
    store = str(own / "bench.db")
    settings = RolloutSettings(
        own / "sessions", parallel=draw.parallel, timeout_s=draw.timeout_s, retries=0
    )
    with (
        ScriptedEngine(folder / "model", play.script, max_model_len=1_000_000) as engine,
        ProxyServer(ProxySettings(engine.base_url, store, tokenizer_dir=folder / "model")) as proxy,
        Reader(store) as reader,
    ):
        fleet = LocalFleet(_sandboxes(play.adapter, cell.sandbox), play.verifier)
        async with Client(proxy.base_url) as client:
            rollout = Rollout(client, play.adapter, fleet, settings)
            try:
                return await _measured(cell, rollout, play, engine, reader)
            finally:
                await fleet.close()


def _sandboxes(adapter: Adapter, kind: str) -> SandboxProvider:
    if kind == "forked" and isinstance(adapter, MiniSweAgent):
        return adapter.sandboxes()
    return SANDBOXES.get(kind)(adapter)


async def _measured(
    cell: Cell, rollout: Rollout, play: _Play, engine: ScriptedEngine, reader: Reader
) -> Cell:
    results = await rollout.collect(map(Job, play.tasks.values()))
    whole = {one.task_id: one for one in results if one.session_id and _is_done(one)}
    problems = [f"not recorded: {_told(one)}" for one in results if one.task_id not in whole]
    rules = {"replay": {"pace": "recorded" if cell.kind in _PACED else "instant"}}
    jobs, branches = [], {}
    for name in sorted(whole):
        session = whole[name].session_id or ""
        branch = _branch(cell.kind, name, LoadedSession.load(reader, session).calls)
        if branch is None:
            problems.append(f"not re-entered: {name} has no turn for it")
            continue
        branches[name] = branch
        jobs.append(Job(play.tasks[name], None, rules, Origin(session, branch.id)))
    before = len(engine.requests)
    again = await rollout.collect(jobs)
    cell = replace(
        cell,
        recorded=len(whole),
        seconds=sum(whole[name].seconds for name in branches),
        seconds_again=sum(one.seconds for one in again),
        asked=len(engine.requests) - before,
        problems=tuple(problems),
    )
    for result in again:
        cell = _with_re_entry(cell, result, branches[result.task_id], reader)
    return cell


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
    """Return the sums with those of a re-entry that is over."""
    if result.session_id is None:
        return replace(cell, problems=(*cell.problems, f"not re-entered: {_told(result)}"))
    calls = LoadedSession.load(reader, result.session_id).calls
    replayed = [call for call in calls if call.replayed_call_id is not None]
    noted = {call.id: {note.name: note.detail for note in call.notes} for call in calls}
    diverged = [notes["replay_diverged"] for notes in noted.values() if "replay_diverged" in notes]
    live = [call for call in calls if call.replayed_call_id is None]
    sampled = [call for call in live if call.status in (CallStatus.COMPLETE, CallStatus.PARTIAL)]
    first = next((c for c in live if noted[c.id].get("replay_live") == branch.id), None)
    audited = audit_session(reader, result.session_id, bodies=True)
    tokens = sum(call.sampled_tokens or 0 for call in live)
    cell = replace(
        cell,
        replayed=cell.replayed + len(replayed),
        asked=cell.asked - len(sampled),
        conserved=cell.conserved + (audited.clean and audited.conservation.captured == tokens),
        noise=dict(Counter(cell.noise) + Counter(_rules(noted.values()))),
    )
    if diverged:
        return replace(cell, stopped=(*cell.stopped, diverged[0]))
    if first is None or not _is_done(result):
        turns = f"{len(replayed)} turns replayed, {len(live)} live"
        return replace(cell, problems=(*cell.problems, f"silent: {turns}; {_told(result)}"))
    was, now = (reader.prompt_token_ids(call.id) for call in (branch, first))
    equal = was is not None and now is not None and list(was) == list(now)
    return replace(cell, entered=cell.entered + 1, equal=cell.equal + equal)


def _rules(noted: Sequence[Mapping[str, str]] | Any) -> list[str]:
    """Return the rules of noise that the notes of calls name, one for each place."""
    details = [notes["replay_noise"] for notes in noted if "replay_noise" in notes]
    places = [place.partition(": ")[2] for detail in details for place in detail.split("; ")]
    return [rule for place in places for rule in place.split(", ")]


def _is_done(result: RolloutResult) -> bool:
    return result.scores.get("reward") == 1.0


def _told(result: RolloutResult) -> str:
    return f"{result.task_id}: {result.outcome}, {result.error or result.answer[-200:]!r}".strip()


_HEADER: Final = """\
| harness | sandbox | sessions | recorded | re-entered | stopped | first live prompt equal | \
replayed turns | engine calls for them | tokens conserved | seconds recorded | again |
|---|---|---|---|---|---|---|---|---|---|---|---|"""


def markdown(report: Report) -> str:
    """Return the report as a table, with the reasons and what fails below."""
    lines = [_HEADER, *map(_row, report.cells)]
    stopped = Counter((c.harness, str(c.kind), why) for c in report.cells for why in c.stopped)
    if stopped:
        lines += ["", "Stopped:"]
        lines += [f"- {name} ({kind}), {n}: {why}" for (name, kind, why), n in stopped.items()]
    if failures := report.failures():
        lines += ["", "What fails:", *(f"- {failure}" for failure in failures)]
    return "\n".join(lines) + "\n"


def _row(cell: Cell) -> str:
    shown = (
        *(cell.harness, cell.sandbox, cell.kind, cell.recorded, cell.entered, len(cell.stopped)),
        *(cell.equal, cell.replayed, cell.asked, cell.conserved),
        *(f"{cell.seconds:.0f}", f"{cell.seconds_again:.0f}"),
    )
    return f"| {' | '.join(map(str, shown))} |"
