"""``bridle bench rivals``: Bridle and other proxies in front of one engine, on the same traffic."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.options import JsonOption
from bridle.cli.terminal import err, fail, out, print_json
from bridle.extras import require


class RivalClient(StrEnum):
    OWN = "own"
    AIPERF = "aiperf"


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
        typer.Option(help="Only this load, such as agent or long8 (vLLM's). Repeatable."),
    ] = None,
    engine: Annotated[
        RivalEngine, typer.Option(help="A stub that measures proxies, or vLLM with a model.")
    ] = RivalEngine.SCRIPTED,
    model: Annotated[
        Path | None,
        typer.Option(help="vLLM's model directory. Default: one small layer, a real tokenizer."),
    ] = None,
    client: Annotated[
        RivalClient, typer.Option(help="The program that leads the sessions: ours, or AIPerf.")
    ] = RivalClient.OWN,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of every arm.")] = 5,
    scale: Annotated[
        float, typer.Option(min=0.001, help="Length of prompts and replies; 1 is as recorded.")
    ] = 1.0,
    gap_ms: Annotated[
        float, typer.Option(min=0, help="Milliseconds between the stub's tokens.")
    ] = 5.0,
    markdown: Annotated[
        Path | None, typer.Option(help="Write the page, or its part, to this file.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compare Bridle with other proxies: throughput kept, first token, memory, and the record."""
    require("torch", "train", "this bench makes a small tokenizer with the trainer")
    from bridle.bench.rivals.aiperf_load import INSTALL, PROGRAM
    from bridle.bench.rivals.arms import ARMS, DIRECT, PRIMED
    from bridle.bench.rivals.measure import LONG, RECORDED, Plan, measure
    from bridle.bench.rivals.page import page, summary

    for given, known in ((arm, ARMS), (workload, (*RECORDED, *LONG))):
        names = [one.name for one in known]
        if unknown := sorted(set(given or ()) - set(names)):
            fail(f"there is no {unknown[0]}; there are {', '.join(names)}", 2)
    if client is RivalClient.AIPERF and not PROGRAM.exists():
        fail(f"AIPerf is not installed: {INSTALL}", 2)
    on_vllm = engine is RivalEngine.VLLM
    usual = LONG if on_vllm else RECORDED
    loads = [one for one in (*RECORDED, *LONG) if one.name in workload] if workload else usual
    plan = Plan(
        engine="vllm" if on_vllm else "scripted",
        workloads=[one.scaled(scale) for one in loads],
        arms=[
            one
            for one in ARMS
            if one.name == DIRECT
            or ((not arm or one.name in arm) and (on_vllm or one.engine != PRIMED))
        ],
        rounds=rounds,
        gap_ms=gap_ms,
        model=model,
        client="own" if client is RivalClient.OWN else "aiperf",
    )
    with err.status("Starting.") as status:
        report = measure(plan, progress=status.update)
    if markdown is not None:
        earlier = markdown.read_text("utf-8") if markdown.exists() else ""
        markdown.write_text(page(report, earlier), encoding="utf-8")
    if json:
        print_json(report)
    else:
        out.print(summary(report))
