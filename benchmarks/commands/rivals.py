"""``bridle bench rivals``: Bridle and other proxies in front of one engine, on the same traffic."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.options import JsonOption
from bridle.cli.terminal import err, fail, out, print_json
from bridle.extras import require


class RivalEngine(StrEnum):
    SCRIPTED = "scripted"
    VLLM = "vllm"


def rivals(
    arm: Annotated[
        list[str] | None,
        typer.Option(help="Only this way to the engine. Repeatable; `direct` is always measured."),
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(help="Only this load: agent, chat16, chat64 or chat128. Repeatable."),
    ] = None,
    engine: Annotated[
        RivalEngine, typer.Option(help="A stub that measures proxies, or vLLM with a model.")
    ] = RivalEngine.SCRIPTED,
    model: Annotated[
        Path | None, typer.Option(help="vLLM's model directory. Default: SmolLM2-135M.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of every arm.")] = 5,
    scale: Annotated[
        float, typer.Option(min=0.001, help="Length of prompts and replies; 1 is as recorded.")
    ] = 1.0,
    gap_ms: Annotated[
        float, typer.Option(min=0, help="Milliseconds between the stub's tokens.")
    ] = 5.0,
    markdown: Annotated[Path | None, typer.Option(help="Write the page to this file.")] = None,
    json: JsonOption = False,
) -> None:
    """Compare Bridle with other proxies: throughput kept, first token, memory, and the record."""
    require("torch", "train", "this bench makes a small tokenizer with the trainer")
    from bridle.bench.rivals.arms import ARMS, DIRECT, PRIMED
    from bridle.bench.rivals.measure import WORKLOADS, Plan, measure
    from bridle.bench.rivals.page import page, summary

    for given, known in ((arm, ARMS), (workload, WORKLOADS)):
        names = [one.name for one in known]
        if unknown := sorted(set(given or ()) - set(names)):
            fail(f"there is no {unknown[0]}; there are {', '.join(names)}", 2)
    on_vllm = engine is RivalEngine.VLLM
    if on_vllm and model is None:
        from bridle.recipes.models.smollm2 import smollm2_directory

        model = Path(smollm2_directory())
    plan = Plan(
        engine="vllm" if on_vllm else "scripted",
        workloads=[one.scaled(scale) for one in WORKLOADS if not workload or one.name in workload],
        arms=[
            one
            for one in ARMS
            if one.name == DIRECT
            or ((not arm or one.name in arm) and (on_vllm or one.engine != PRIMED))
        ],
        rounds=rounds,
        gap_ms=gap_ms,
        model=model,
    )
    with err.status("Starting.") as status:
        report = measure(plan, progress=status.update)
    if markdown is not None:
        markdown.write_text(page(report), encoding="utf-8")
    if json:
        print_json(report)
    else:
        out.print(summary(report))
