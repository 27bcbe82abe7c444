"""The report of a demo run: as data, as a table, and as a plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from rich.table import Table

from bridle.reconstruct.evaluation import attempts_of, wilson
from bridle.run.attempts import attempt_figures, attempts_as_data
from bridle.run.report import plot_rewards, training_figures
from bridle.store.reading.queries import Reader

mpl.use("Agg")

from matplotlib import pyplot

WHOLE = "whole"
"""The name of the run of all stages, whose attempts are the demo's."""
PHASES = ("before", "greedy_before", "after", "greedy_after")


def session_rewards(reader: Reader, run_id: str) -> list[float]:
    """Return the rewards of a run's sessions that came to an end, one per task."""
    return list({one.task: one.reward for one in attempts_of(reader, run=run_id)}.values())


def make_report(reader: Reader, runs: Mapping[str, str]) -> dict[str, Any]:
    """Return the report of a finished demo; every figure is computed from the store.

    ``runs`` are run ids by stage. Minutes are those of all attempts at the demo. Token figures are
    those of the training run.
    """
    figures: dict[str, Any] = {}
    for phase in PHASES:
        rewards = session_rewards(reader, runs[phase])
        mean = sum(rewards) / len(rewards)
        key = phase if phase.startswith("greedy") else f"reward_{phase}"
        figures[key] = mean
        figures[f"{key}_interval"] = wilson(sum(rewards), len(rewards))
        figures[f"{key}_tasks"] = len(rewards)
    figures["gain"] = figures["reward_after"] - figures["reward_before"]
    figures |= _counts(reader)
    figures |= training_figures(reader, runs["train"])
    figures |= attempts_as_data(attempt_figures(reader, runs[WHOLE]))
    return figures


def _counts(reader: Reader) -> dict[str, int]:
    ids = [session.id for session in reader.sessions()]
    calls = sum(sum(counts.values()) for counts in reader.call_counts_of(ids).values())
    return {"sessions": len(ids), "calls": calls}


def table(report: Mapping[str, Any]) -> Table:
    shown = Table(box=None, pad_edge=False)
    for heading in ("held-out tasks", "before", "after"):
        shown.add_column(heading, justify="left" if heading.startswith("held") else "right")
    for label, before, after in (
        ("at the training temperature", "reward_before", "reward_after"),
        ("greedy", "greedy_before", "greedy_after"),
    ):
        shown.add_row(f"{label}", _share(report, before), _share(report, after))
    return shown


def _share(report: Mapping[str, Any], key: str) -> str:
    low, high = report[f"{key}_interval"]
    return f"{report[key]:.2f}  ({low:.2f}–{high:.2f})"


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Plot the reward over GRPO steps, with the held-out figures before and after."""
    rewards: list[float | None] = report["reward_by_step"]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    plot_rewards(axes, rewards, "training questions, mean of a step")
    for key, step, label in (
        ("reward_before", 0, "held-out questions, sampled"),
        ("reward_after", len(rewards) + 1, None),
    ):
        low, high = report[f"{key}_interval"]
        mean = report[key]
        axes.errorbar(
            [step],
            [mean],
            [[mean - low], [high - mean]],
            color="#ff725c",
            marker="s",
            capsize=4,
            linestyle="none",
            label=label,
        )
    axes.plot(
        [0, len(rewards) + 1],
        [report["greedy_before"], report["greedy_after"]],
        color="#3ca951",
        marker="D",
        markersize=5,
        linestyle="none",
        label="held-out questions, greedy",
    )
    axes.set(
        xlabel="GRPO step",
        ylabel="share of right answers",
        ylim=(0, 1.03),
        title=f"Held-out reward {report['reward_before']:.2f} → {report['reward_after']:.2f}",
    )
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    figure.savefig(path, dpi=150, format="png")
    pyplot.close(figure)
