"""``bridle bench containers``: sessions in fresh containers against local processes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from bridle.cli.options import JsonOption
from bridle.cli.terminal import err, out, print_json
from bridle.extras import require

if TYPE_CHECKING:
    from bridle.bench.containers import Speeds


def containers(
    harness: Annotated[str, typer.Option(help="A harness with a layer.")] = "mini-swe-agent",
    sessions: Annotated[int, typer.Option(min=1, help="Sessions per round.")] = 16,
    parallel: Annotated[int, typer.Option(min=1, help="Sessions at a time.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each.")] = 3,
    json: JsonOption = False,
) -> None:
    """Measure sessions per second, in containers and as local processes.

    Exit with 1 if the sessions left a container, a volume, a network or a folder behind.
    """
    from bridle.bench.containers import bench_containers

    require("torch", "train", "this bench makes a small tokenizer with the trainer")
    speeds = asyncio.run(
        bench_containers(
            harness,
            sessions,
            parallel,
            rounds,
            lambda line: err.print(line),
        )
    )
    if json:
        print_json(speeds.as_data())
    else:
        _print(speeds)
    if speeds.left_behind:
        raise typer.Exit(1)


def _print(speeds: Speeds) -> None:
    rates = ", ".join(f"{name} {rate:.2f}" for name, rate in speeds.per_s.items())
    ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in speeds.ratios.items())
    out.print(f"{speeds.harness}, {speeds.parallel} at a time, sessions/s: {rates}")
    out.print(f"of the same without a container: {ratios}")
    left = ", ".join(speeds.left_behind) or "nothing"
    out.print(f"left behind by {speeds.ran} sessions: {left}")
