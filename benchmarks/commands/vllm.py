"""``bridle bench vllm``: the cost of recording for a real vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.options import JsonOption
from bridle.cli.terminal import err, out, print_json
from bridle.extras import require


def vllm(
    model: Annotated[
        Path | None, typer.Option(help="A model directory. Default: one is made.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Sessions at a time.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Direct and proxied, in turns.")] = 3,
    calls: Annotated[int, typer.Option(min=1, max=32, help="Per session and round.")] = 2,
    tokens: Annotated[int, typer.Option(min=1, help="Length of each reply.")] = 128,
    publishes: Annotated[
        int, typer.Option(min=0, help="Versions by directory and by transfer each.")
    ] = 3,
    json: JsonOption = False,
) -> None:
    """Measure tokens per second of vLLM through the recording proxy, against direct requests."""
    from bridle.bench.vllm import Plan, measure

    if model is None or publishes:
        require("torch", "train", "this bench makes and publishes a small policy")
    plan = Plan(
        concurrency=concurrency, rounds=rounds, calls=calls, tokens=tokens, publishes=publishes
    )
    with err.status("Starting.") as status:
        report = measure(plan, model, progress=status.update)
    if json:
        print_json(report)
        return
    for target, value in report["tokens_per_s"].items():
        out.print(f"{target:<16} {value:>10,.1f} tokens/s")
    out.print(
        f"proxied/direct   {report['ratio']:>10.3f}  "
        f"({report['proxy_cpu_us_per_token']} µs of the proxy's processor per token)"
    )
    for through, seconds in report.get("publish", {}).get("seconds", {}).items():
        still = report["publish"]["paused_seconds"][through]
        out.print(f"publish, {through:<10} {seconds:.2f} s, paused for {still:.2f} s of it")
