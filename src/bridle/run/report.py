"""The report of a training run: figures from the store, as data, as lines and as a plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib as mpl
import orjson

from bridle.harnesses.stages import NAMES
from bridle.reconstruct.accounts import StatedRules, account_lines, token_account
from bridle.reconstruct.episodes import episode_of
from bridle.reconstruct.evaluation import Evaluation
from bridle.reconstruct.rewards import findings_in
from bridle.reconstruct.session import LoadedSession
from bridle.reconstruct.tree import BrokenTree
from bridle.run.attempts import attempt_figures, attempts_as_data
from bridle.store.reading.queries import Reader
from bridle.store.reading.session_filter import SessionFilter
from bridle.store.records import RunRecord

mpl.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

EVALUATION = "evaluation/"
"""The prefix of the names of an evaluation's numbers in the store."""


def training_figures(reader: Reader, run_id: str) -> dict[str, Any]:
    """Return the figures of a training run; every one is computed from the store.

    Tokens are those of all sessions of the run, its held-out ones included
    (:mod:`bridle.reconstruct.accounts`).
    """
    steps: dict[int, dict[str, float]] = {}
    for metric in reader.metrics(run_id):
        steps.setdefault(metric.step, {})[metric.name] = metric.value
    measured = [values.get("update/logprob_gap") for values in steps.values()]
    gaps = [gap for gap in measured if gap is not None]
    rows = _rows(reader, run_id)
    return {
        **token_figures(reader, run_id),
        "rows_per_session": sum(rows) / len(rows) if rows else None,
        "logprob_gap": max(gaps, default=None),
        "steps": sum("sessions/collected" in values for values in steps.values()),
        "stage_seconds": stage_seconds(reader, run_id),
        "sessions_re_entered": sum(
            one.origin_session_id is not None for one in reader.sessions(run=run_id)
        ),
        "findings": _findings(reader, run_id),
        "versions": sum(policy.verified for policy in reader.policies(run_id)),
        "reward_by_step": [
            values.get("reward/mean")
            for _, values in sorted(steps.items())
            if "sessions/collected" in values
        ],
    }


def token_figures(reader: Reader, run_id: str) -> dict[str, Any]:
    """Return the account of a run's tokens: sums by fate, and ``tokens`` by fate and reason."""
    account = token_account(reader, SessionFilter(run=run_id))
    fates = ("trained", "trainable", "masked", "dropped")
    return {
        "tokens_captured": account.captured,
        **{f"tokens_{fate}": account.of(fate) for fate in fates},
        "tokens": {line.label: line.tokens for line in account_lines(account.fates)},
    }


def tokens_line(figures: Mapping[str, Any]) -> str:
    """Return the account of a run's tokens as a line for a person."""
    parts = []
    for fate in ("masked", "dropped"):
        reasons = [
            f"{tokens} {label.removeprefix(f'{fate}: ').replace('_', ' ')}"
            for label, tokens in figures["tokens"].items()
            if label.startswith(f"{fate}: ")
        ]
        shown = f" ({', '.join(reasons)})" if reasons else ""
        parts.append(f"{figures[f'tokens_{fate}']} {fate}{shown}")
    if left := figures["tokens_trainable"]:
        parts.append(f"{left} trainable and not trained")
    return (
        f"of {figures['tokens_captured']} tokens sampled {figures['tokens_trained']} were trained, "
        + ", ".join(parts)
    )


def minutes_line(report: Mapping[str, Any]) -> str:
    """Return the time that a run took, for a person."""
    line, attempts = f"{report['minutes']:.1f} minutes", report["attempts"]
    if len(attempts) > 1:
        line += f" in {len(attempts)} attempts, {report['last_attempt_minutes']:.1f} in the last"
    return line


def _attempts_line(report: Mapping[str, Any]) -> str:
    sessions = sum(one["sessions"] for one in report["attempts"])
    line = f"{minutes_line(report)}; {sessions} sessions"
    if again := report["sessions_re_entered"]:
        line += f", {again} of which re-entered another"
    return line


def stage_seconds(reader: Reader, run_id: str) -> dict[str, float]:
    """Return the mean seconds of each stage of a session.

    The stages' names are those of ``bridle.harnesses.stages``.
    """
    taken = [session.labels or {} for session in reader.sessions(run=run_id, sealed=True)]
    measured = [labels["seconds"] for labels in taken if "seconds" in labels]
    names = dict.fromkeys(name for seconds in measured for name in seconds)
    return {
        name: sum(seconds.get(name, 0.0) for seconds in measured) / len(measured) for name in names
    }


def _findings(reader: Reader, run_id: str) -> dict[str, int]:
    """Return the number of sessions with each finding, by the finding's name."""
    ids = [session.id for session in reader.sessions(run=run_id)]
    given = reader.rewards_of(ids).values()
    return dict(Counter(name for own in given for name in {one.name for one in findings_in(own)}))


def _rows(reader: Reader, run_id: str) -> list[int]:
    """Return for each session the number of its samples that train something.

    The rules of the run decide this.
    """
    rules = StatedRules(reader).of(run_id)
    found = []
    for session in LoadedSession.stream(reader, reader.sessions(run=run_id, sealed=True)):
        try:
            samples = episode_of(session, rules).samples
        except BrokenTree:
            continue
        found.append(sum(bool(sample.mask.any()) for sample in samples))
    return found


def evaluations(reader: Reader, run_id: str) -> list[dict[str, float]]:
    """Return a run's measurements on held-out tasks, in order.

    Each has ``step`` (steps completed) and the numbers of :func:`evaluation_metrics` without their
    prefix.
    """
    found: dict[int, dict[str, float]] = {}
    for metric in reader.metrics(run_id):
        if metric.name.startswith(EVALUATION):
            own = found.setdefault(metric.step, {"step": metric.step + 1})
            own[metric.name.removeprefix(EVALUATION)] = metric.value
    return [found[step] for step in sorted(found)]


def evaluation_metrics(measured: Evaluation) -> dict[str, float]:
    k, mean = measured.mean_at
    named = {f"pass_at_{k}": value for k, value in measured.pass_at.items()}
    named[f"mean_at_{k}"] = named["reward"] = mean
    return {
        f"{EVALUATION}{name}{ending}": number
        for name, value in named.items()
        for ending, number in (("", value.value), ("_low", value.low), ("_high", value.high))
    }


def write_report(reader: Reader, run_id: str, directory: Path) -> dict[str, Any]:
    """Write ``report.json`` and ``reward.png`` of a run into ``directory``; return the report."""
    report = training_figures(reader, run_id) | {"evaluations": evaluations(reader, run_id)}
    report |= attempts_as_data(attempt_figures(reader, run_id))
    report["run"] = _run_as_data(reader.run(run_id))
    (directory / "report.json").write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    plot_training(report, directory / "reward.png")
    return report


def _run_as_data(run: RunRecord) -> dict[str, Any]:
    """Return which run a report is about, and the configuration that it began with."""
    begun = datetime.fromtimestamp(run.started_at, UTC).isoformat(timespec="seconds")
    config = run.config or {}
    return {"id": run.id, "name": run.name, "kind": run.kind, "started_at": begun, "config": config}


def report_lines(report: Mapping[str, Any]) -> list[str]:
    rewards = [value for value in report["reward_by_step"] if value is not None]
    lines = []
    if rewards:
        few = max(1, min(3, len(rewards) // 2))
        first, last = sum(rewards[:few]) / few, sum(rewards[-few:]) / few
        steps = f"{report['steps']} step{'' if report['steps'] == 1 else 's'}"
        lines.append(f"training reward {first:.3f} → {last:.3f} in {steps}")
    measured = report["evaluations"]
    if measured:
        best = max(measured, key=lambda one: one["reward"])
        lines.append(
            f"held-out reward {_interval(measured[0])} → {_interval(measured[-1])}; best "
            f"{_interval(best)} after step {best['step']}"
        )
    gap, rows = report["logprob_gap"], report["rows_per_session"]
    parts = [tokens_line(report)]
    if rows is not None:
        parts.append(f"{rows:.2f} rows per session")
    if gap is not None:
        parts.append(f"engine and trainer differ by {gap:.1e} nats")
    lines.append("; ".join(parts))
    lines.append(_attempts_line(report))
    if stages := report["stage_seconds"]:
        spent = ", ".join(f"{NAMES[name]} {seconds:.1f} s" for name, seconds in stages.items())
        lines.append(f"a session on average: {spent}")
    return lines


def _interval(measured: Mapping[str, float]) -> str:
    return f"{measured['reward']:.3f} ({measured['reward_low']:.3f}–{measured['reward_high']:.3f})"


def plot_training(report: Mapping[str, Any], path: Path) -> None:
    """Plot the reward over steps, with the held-out figures and their intervals, if any."""
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    plot_rewards(axes, report["reward_by_step"], "training tasks, mean of a step")
    measured = report["evaluations"]
    if measured:
        values = [one["reward"] for one in measured]
        axes.errorbar(
            [one["step"] for one in measured],
            values,
            [
                [one["reward"] - one["reward_low"] for one in measured],
                [one["reward_high"] - one["reward"] for one in measured],
            ],
            color="#ff725c",
            marker="s",
            capsize=4,
            label="held-out tasks",
        )
    axes.set(xlabel="step", ylabel="reward", title=_title(report))
    _from_zero_to_one(axes)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=150, format="png")
    pyplot.close(figure)


def _title(report: Mapping[str, Any]) -> str:
    measured = report["evaluations"]
    named = [str(report["run"]["name"] or report["run"]["id"])] if "run" in report else []
    if measured:
        before, after = measured[0]["reward"], measured[-1]["reward"]
        named.append(f"held-out reward {before:.2f} → {after:.2f}")
    return ": ".join(named)


def _from_zero_to_one(axes: Axes) -> None:
    """Show the whole range from 0 to 1, and more where the data leaves it."""
    low, high = axes.dataLim.intervaly
    axes.set_ylim(min(0.0, 1.03 * low), max(1.03, 1.03 * high))


def plot_evaluations(parts: Mapping[str, Evaluation], path: Path) -> None:
    """Plot pass@k over k, with a line and its intervals for each part."""
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name, one in parts.items():
        ks = sorted(one.pass_at)
        values = [one.pass_at[k] for k in ks]
        below = [value.value - value.low for value in values]
        above = [value.high - value.value for value in values]
        shares = [value.value for value in values]
        axes.errorbar(ks, shares, [below, above], marker="o", capsize=4, label=name)
    axes.set(xlabel="k", ylabel="pass@k", ylim=(0, 1.03))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150, format="png")
    pyplot.close(figure)


def plot_rewards(axes: Axes, rewards: list[float | None], label: str) -> None:
    """Draw a point for each step that has a reward."""
    points = [(step, value) for step, value in enumerate(rewards, start=1) if value is not None]
    axes.plot(
        [step for step, _ in points],
        [value for _, value in points],
        color="#4269d0",
        marker="o",
        markersize=4,
        label=label,
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
