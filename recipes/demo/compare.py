"""Demo runs from one fine-tuned policy, with other ways to collect and to branch, seed by seed.

``python -m bridle.recipes.demo.compare START OUT`` runs every way with every seed, and prints, by
way: the held-out reward, the sampled tokens, and the tokens until the training questions reached a
reward. A run's figures are a line of ``OUT/figures.jsonl``, so that a stopped comparison goes on
with the runs that are left. With ``--plot`` the rewards are drawn over the minutes of training.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import accumulate, product
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import matplotlib as mpl
import orjson

from bridle.recipes.demo.stages import Places
from bridle.recipes.demo.state import DemoState
from bridle.store.reading.queries import Reader

WAYS: Final[Mapping[str, Sequence[str]]] = {
    "grpo": (),
    "sessions": ("collection=sessions", "max_staleness=1", "baseline=leave_one_out"),
    "siblings": ("branch=0.5", "branch_at=value", "baseline=siblings"),
    "turn_values": ("branch=0.5", "branch_at=value", "baseline=turn_values"),
}
"""The changed settings of each way. The first is on-policy, and the others are compared with it."""
COMMON: Final = ("goal=2", "final_fraction=1", "greedy_tasks=50")
"""Settings of all runs: none ends early, and the learning rate does not depend on their length."""
ENOUGH: Final = 2
"""Number of steps whose mean reward has to be reached."""


Step = tuple[float, float, float]
"""A step's sampled tokens, the reward of its sessions from their start, and its seconds."""


def compare(
    start: Path,
    out: Path,
    ways: Sequence[str],
    seeds: Iterable[int],
    further: Sequence[str],
    processes: int,
) -> list[dict[str, Any]]:
    """Return the figures of all runs that ended, those of an earlier call included."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / "figures.jsonl"
    known = [orjson.loads(line) for line in file.read_bytes().splitlines()] if file.exists() else []
    have = {(one["way"], one["seed"]) for one in known}
    left = [job for job in product(seeds, ways) if (job[1], job[0]) not in have]
    with ThreadPoolExecutor(processes) as pool, file.open("ab") as written:
        running = [pool.submit(_run, start, out, way, seed, further) for seed, way in left]
        for done in as_completed(running):
            try:
                one = done.result()
            except subprocess.CalledProcessError as failure:
                print(f"a run failed: {shlex.join(map(str, failure.cmd))}", file=sys.stderr)
                continue
            known.append(one)
            written.write(orjson.dumps(one, option=orjson.OPT_APPEND_NEWLINE))
            written.flush()
            print(f"{one['way']}, seed {one['seed']}: ended", file=sys.stderr)
    return known


def _run(start: Path, out: Path, way: str, seed: int, further: Sequence[str]) -> dict[str, Any]:
    folder = out / f"{way}-{seed}"
    settings = (*COMMON, f"seed={seed}", *WAYS[way], *further)
    command = [sys.executable, "-m", "bridle", "demo", "--policy", "tiny", "--json"]
    command += ["--start-from", str(start), "--out", str(folder)]
    command += ["--store", Places(folder).store]
    for each in settings:
        command += ["--set", each]
    folder.mkdir(exist_ok=True)
    with (folder / "log").open("ab") as log:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, check=True)
    report = orjson.loads(done.stdout)
    kept = ("reward_before", "reward_after", "greedy_after", "stage_seconds", "tokens_captured")
    return {
        "way": way,
        "seed": seed,
        **{name: report[name] for name in kept},
        "steps": _steps(folder),
    }


def _steps(folder: Path) -> list[Step]:
    steps: dict[int, dict[str, float]] = {}
    with Reader(Places(folder).store) as reader:
        for metric in reader.metrics(DemoState(folder).runs["train"]):
            steps.setdefault(metric.step, {})[metric.name] = metric.value
    return [
        (
            of["tokens/captured"],
            of.get("reward/whole", of["reward/mean"]),
            sum(value for name, value in of.items() if name.startswith("seconds/")),
        )
        for _, of in sorted(steps.items())
        if "reward/mean" in of
    ]


def tokens_until(steps: Sequence[Step], reward: float) -> float:
    """Return the sampled tokens until :data:`ENOUGH` steps in a row had ``reward`` on average."""
    sums = list(accumulate(step[0] for step in steps))
    for last in range(ENOUGH - 1, len(steps)):
        if fmean(step[1] for step in steps[last + 1 - ENOUGH : last + 1]) >= reward:
            return sums[last]
    return inf


def table(found: Sequence[Mapping[str, Any]], reward: float) -> str:
    """Return the figures by way as a Markdown table."""
    heads = (
        "way",
        "held-out reward by seed",
        "mean",
        "sampled tokens, mean",
        f"tokens to {reward}",
        "median ÷ first",
    )
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    first = inf
    for way in WAYS:
        own = sorted((one for one in found if one["way"] == way), key=lambda one: one["seed"])
        if not own:
            continue
        held_out = [one["reward_after"] for one in own]
        until = [tokens_until(one["steps"], reward) for one in own]
        first = first if lines[2:] else median(until)
        cells = (
            way,
            ", ".join(f"{each:.2f}" for each in held_out),
            f"{fmean(held_out):.3f}",
            f"{fmean(one['tokens_captured'] for one in own):,.0f}",
            ", ".join("–" if each == inf else f"{each:,.0f}" for each in until),
            "–" if inf in (median(until), first) else f"{median(until) / first:.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot each run's rewards over the minutes of its training: of steps, and their means."""
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for color, way in zip(("#4269d0", "#efb118", "#ff725c", "#6cc5b0"), WAYS, strict=True):
        label: str | None = way
        for one in (one for one in found if one["way"] == way):
            minutes = [sum_ / 60 for sum_ in accumulate(step[2] for step in one["steps"])]
            rewards = [step[1] for step in one["steps"]]
            means = [fmean(rewards[max(0, at - 4) : at + 1]) for at in range(len(rewards))]
            axes.plot(minutes, rewards, ".", color=color, alpha=0.4)
            axes.plot(minutes, means, color=color, label=label)
            label = None
    axes.set(
        xlabel="minutes of training",
        ylabel="reward of sessions from their start",
        ylim=(0, 1.03),
        title="Steps (dots) and the mean of up to five (lines)",
    )
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    figure.savefig(path, dpi=150, format="png")
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("start", type=Path, help="folder of a demo run of the tiny policy")
    parser.add_argument("out", type=Path)
    parser.add_argument("--way", action="append", choices=list(WAYS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=100)
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    parser.add_argument("--reach", type=float, default=0.9, help="the reward to reach")
    parser.add_argument("--engine", default="embedded", choices=("embedded", "vllm"))
    parser.add_argument("--plot", type=Path, help="draw the rewards to this PNG file")
    parser.add_argument("--set", action="append", default=[], help="a setting of all runs")
    given = parser.parse_args(arguments)
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    ways = given.way or list(WAYS)
    settings = [f"engine={given.engine}", *given.set]
    found = compare(given.start, given.out, ways, seeds, settings, given.processes)
    print(table(found, given.reach))
    if given.plot is not None:
        plot(found, given.plot)


if __name__ == "__main__":
    main()
