"""``bridle bench harnesses``: whether each conversation is one row, whatever harnesses send back.

Each harness runs unmodified against a scripted policy through the real proxy, once with exact
continuation and once with rendered history, under a template that strips thinking and rewrites
arguments. The recording is then rebuilt and audited. Nothing here needs a GPU or a network.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bridle.bench.harness_cases import CASES, HarnessCase
from bridle.bench.shell_policy import ShellPolicy, WorkedThrough, train_bench_tokenizer
from bridle.engine.scripted import ScriptedEngine
from bridle.harnesses.client import Client
from bridle.harnesses.episode import Outcome
from bridle.harnesses.fleet import LocalFleet
from bridle.harnesses.rollout import Job, Rollout, RolloutResult, RolloutSettings
from bridle.harnesses.sampling import AGENT, session_settings
from bridle.harnesses.sandboxes import NotLaunchable, ProcessProvider
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.reconstruct.audit import audit_session
from bridle.reconstruct.samples.builders import build
from bridle.reconstruct.samples.rules import SampleRules
from bridle.reconstruct.session import LoadedSession
from bridle.store.reading.queries import CallRow, Reader
from bridle.store.records import BreakReason, CallKind, CallStatus, Continuation

MODES: Final = (Continuation.EXACT, Continuation.RENDERED)
MAIN_ROWS: Final = SampleRules(kinds=frozenset({CallKind.MAIN, CallKind.UNKNOWN}))
"""The rules of the counted rows: only calls that are known to be side calls, sub-agents or
compactions are left out."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one harness under one continuation mode."""

    sessions: int
    calls: int
    """Number of calls of every kind."""
    rows: int
    """Number of branches with trainable tokens of the agent's own conversation."""
    breaks: int
    """Number of calls that break, of every kind."""
    reasons: Counter[str]
    """Number of breaks by reason; one call may break for several reasons at once."""
    unlinked: int
    """Number of calls of the agent's own conversation that should continue another call but have no
    parent."""
    kinds: Counter[str]
    trained: int = 0
    """Number of sampled tokens that can be trained."""
    masked: Counter[str] = field(default_factory=Counter)
    """Number of sampled tokens that cannot be trained, by reason."""
    problems: tuple[str, ...] = ()
    """Reasons why the run does not count: it failed, or its record is not clean."""

    @classmethod
    def without_start(cls, error: NotLaunchable) -> Figures:
        """Return the figures of a harness that could not start."""
        none: Counter[str] = Counter()
        return cls(0, 0, 0, 0, none, 0, none, problems=(f"did not start: {error}",))

    @property
    def unexplained(self) -> int:
        return self.reasons[BreakReason.UNEXPLAINED] + self.unlinked

    @property
    def trained_share(self) -> float:
        """The share of the sampled tokens that can be trained."""
        return self.trained / max(1, self.trained + self.masked.total())

    def as_data(self) -> dict[str, Any]:
        return {
            "sessions": self.sessions,
            "rows_per_session": self.rows / self.sessions if self.sessions else None,
            "breaks": self.breaks,
            "unexplained": self.unexplained,
            "breaks_by_reason": dict(sorted(self.reasons.items())),
            "trained_share": round(self.trained_share, 4),
            "masked": dict(sorted(self.masked.items())),
            "calls": self.calls,
            "calls_by_kind": dict(sorted(self.kinds.items())),
            "problems": list(self.problems),
        }


@dataclass(slots=True)
class Report:
    """All figures, by harness and mode."""

    turns: int
    figures: dict[str, dict[Continuation, Figures]] = field(default_factory=dict)

    def as_data(self) -> dict[str, Any]:
        return {
            name: {str(mode): figures.as_data() for mode, figures in modes.items()}
            for name, modes in self.figures.items()
        }

    def failures(self) -> list[str]:
        """Return one line for each requirement that fails.

        Each exact session must be one row without an unexplained break, and the record of every
        session must be clean.
        """
        found: list[str] = []
        for name, modes in self.figures.items():
            for mode, figures in modes.items():
                found += [f"{name} ({mode}): {problem}" for problem in figures.problems]
            exact = modes.get(Continuation.EXACT)
            if exact is None or not exact.sessions:
                continue
            if exact.rows != exact.sessions:
                found.append(f"{name} (exact): {exact.rows} rows of {exact.sessions} sessions")
            if exact.unexplained:
                found.append(f"{name} (exact): {exact.unexplained} unexplained breaks")
        return found


async def bench_harnesses(
    cases: Sequence[HarnessCase],
    *,
    turns: int = 12,
    sessions: int = 1,
    parallel: int = 2,
    timeout_s: float = 300.0,
    keep: Path | None = None,
    progress: Callable[[str, Continuation], None] = lambda name, mode: None,
) -> Report:
    """Run every case in both modes. A harness that cannot start is a problem of its own.

    Each harness samples at its own settings, so that the report shows what they leave to train.
    If ``keep`` is given, the recordings stay there (``bench.db`` and the sessions' directories).
    """
    policy = ShellPolicy(turns)
    report = Report(turns)
    with ExitStack() as stack:
        if keep is None:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bridle-bench-")))
        else:
            place = keep
        train_bench_tokenizer(place / "model")
        engine = stack.enter_context(
            ScriptedEngine(place / "model", policy, max_model_len=1_000_000)
        )
        store = str(place / "bench.db")
        proxy = stack.enter_context(
            ProxyServer(ProxySettings(engine.base_url, store, tokenizer_dir=place / "model"))
        )
        reader = stack.enter_context(Reader(store))
        adapters = {case.name: case.adapter() for case in cases}
        async with Client(proxy.base_url) as client:
            for case in cases:
                modes = report.figures.setdefault(case.name, {})
                for mode in MODES:
                    settings = RolloutSettings(
                        place / "sessions" / case.name / mode,
                        parallel=parallel,
                        timeout_s=timeout_s,
                        continuation=mode,
                        session_settings=session_settings(AGENT),
                        retries=0,
                        keep_directories=True,
                    )
                    rollout = Rollout(
                        client,
                        adapters[case.name],
                        LocalFleet(ProcessProvider(), WorkedThrough()),
                        settings,
                    )
                    jobs = [Job(policy.task(f"{case.name}-{n}")) for n in range(sessions)]
                    try:
                        results = await rollout.collect(jobs)
                    except NotLaunchable as error:
                        modes[mode] = Figures.without_start(error)
                    else:
                        modes[mode] = measured(reader, results, settings.directory)
                    progress(case.name, mode)
    return report


def measured(reader: Reader, results: Sequence[RolloutResult], directory: Path) -> Figures:
    """Return the figures of these rollouts, read from the store."""
    problems: list[str] = []
    rows = unlinked = breaks = calls_made = trained = 0
    masked: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for result in results:
        if result.outcome is not Outcome.COMPLETED or result.scores.get("reward") != 1.0:
            problems.append(_unfinished(result, directory))
        if result.session_id is None:
            continue
        audited = audit_session(reader, result.session_id, bodies=True)
        if not audited.clean:
            problems.append(f"audit: {', '.join(v.rule for v in audited.violations)}")
        session = LoadedSession.load(reader, result.session_id)
        calls = session.calls
        problems += [f"call {c.status}: {c.reason}" for c in calls if _spoilt(c)]
        built = build(session, MAIN_ROWS)
        rows += len(built.samples)
        trained += built.conservation.trained
        masked += built.conservation.untrained
        breaks += sum(call.break_reason is not None for call in calls)
        reasons.update(reason for call in calls for reason in call.break_reasons)
        kinds.update(str(call.kind) for call in calls)
        calls_made += len(calls)
        main = [call for call in calls if call.kind in MAIN_ROWS.kinds]
        unlinked += max(0, sum(call.parent_call_id is None for call in main) - 1)
    return Figures(
        sessions=len(results),
        calls=calls_made,
        rows=rows,
        breaks=breaks,
        reasons=reasons,
        unlinked=unlinked,
        kinds=kinds,
        trained=trained,
        masked=masked,
        problems=tuple(problems),
    )


def _spoilt(call: CallRow) -> bool:
    return call.status not in (CallStatus.COMPLETE, CallStatus.PARTIAL)


def _unfinished(result: RolloutResult, directory: Path) -> str:
    text = f"{result.outcome}, exit code {result.exit_code}, said {result.answer[-200:]!r}"
    log = directory / str(result.session_id) / "outputs/agent.stderr"
    if log.exists():
        text += f", stderr ends {log.read_text(errors='replace')[-500:]!r}"
    return f"{text} {result.error}".strip()


_INTRODUCTION: Final = """\
# The harnesses, exact and rendered

Each harness ran unmodified through the proxy, against a scripted policy that asks for two shell
commands at once, {turns} turns long and thinking in every turn, under a chat template that strips
thinking from the history and writes arguments its own way. *Rows* are the main branches with
trainable tokens per session. *Rendered* is the same run with the history rendered again every turn,
as in a proxy that keeps no tokens. *On what* counts its breaks by reason; most breaks have several
reasons, and each is counted. *Trained* is the share of the sampled tokens that can be trained at the
harness's own sampling settings, with the reasons of the others. Made by
`bridle bench harnesses --table docs/harnesses.md`.

| harness | version | dialect | calls | exact: rows | trained | breaks | unexplained | rendered: rows | breaks | on what |
|---|---|---|---|---|---|---|---|---|---|---|"""  # noqa: E501


def markdown(report: Report) -> str:
    """Return the report as the published page: its introduction, and one line per harness."""
    lines = [_INTRODUCTION.format(turns=report.turns)]
    for name, modes in report.figures.items():
        lines.append(_table_row(name, modes))
    side = [name for name, modes in report.figures.items() if _asides(modes)]
    if side:
        lines += ["", "Calls beside the conversation (titles and the like), classified and not"]
        lines.append(f"trained: {', '.join(_asides_of(report, name) for name in side)}.")
    lines.append(_MASKED)
    failures = report.failures()
    lines += ["", "The audit of every session is clean." if not failures else "What fails:"]
    lines += [f"- {failure}" for failure in failures]
    return "\n".join(lines) + "\n"


def _table_row(name: str, modes: Mapping[Continuation, Figures]) -> str:
    exact, rendered = modes[Continuation.EXACT].as_data(), modes[Continuation.RENDERED].as_data()
    reasons = ", ".join(f"{why} {n}" for why, n in rendered["breaks_by_reason"].items())
    case = CASES.get(name)
    cells = (
        name,
        (case and case.version) or "–",
        (case and case.dialect) or "–",
        exact["calls"],
        _rows(exact),
        _trained(modes[Continuation.EXACT]),
        exact["breaks"],
        exact["unexplained"],
        _rows(rendered),
        rendered["breaks"],
        reasons or "–",
    )
    shown = (f"{cell:g}" if isinstance(cell, float) else str(cell) for cell in cells)
    return f"| {' | '.join(shown)} |"


def _rows(figures: Mapping[str, Any]) -> float | str:
    rows: float | None = figures["rows_per_session"]
    return "–" if rows is None else rows


def _trained(figures: Figures) -> str:
    reasons = "".join(f", {reason} {count}" for reason, count in sorted(figures.masked.items()))
    return f"{figures.trained_share:.1%}{reasons}"


_MASKED: Final = """
A client that asks for temperature 0 trains nothing (`sampler_greedy`): the likeliest token is
always taken, so that sessions do not differ and no distribution can be trained. `bridle rollout`
and `bridle train` pin sessions to the policy's own distribution, whatever the harness asks for
(`agent.sampling`, [training.md](training.md#sampling-parameters)); `bridle run --sampling
policy` pins a person's own session. The engine of this table has no grammars; where it has, a
required or named tool choice and `parallel_tool_calls: false` leave the reasoning to train
([vllm.md](vllm.md#where-vllm-differs-from-the-other-engines))."""


def _asides(modes: Mapping[Continuation, Figures]) -> int:
    kinds = modes[Continuation.EXACT].kinds
    return kinds.total() - sum(kinds[kind] for kind in MAIN_ROWS.kinds)


def _asides_of(report: Report, name: str) -> str:
    return f"{name} {_asides(report.figures[name])}"


def chosen(names: Sequence[str]) -> list[HarnessCase]:
    """Return the cases of these names, or all of them if there are none.

    Raise ``KeyError`` for an unknown name.
    """
    return [CASES[name] for name in names] if names else list(CASES.values())
