"""``bridle bench train``: what a training step costs in trees and in rows."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from bridle.cli.extras import require
from bridle.cli.options import JsonOption
from bridle.cli.terminal import err, out, print_json


class BatchName(StrEnum):
    BRANCHING = "branching"
    SHARED_PROMPT = "shared_prompt"
    LINEAR = "linear"


def train(
    batch: Annotated[
        list[BatchName] | None,
        typer.Option(help="A batch to measure. Repeatable; default: all of them."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a pack, in trees and in rows.")
    ] = 32_768,
    device: Annotated[str, typer.Option(help="PyTorch's name of it: cpu, cuda.")] = "cpu",
    json: JsonOption = False,
) -> None:
    """Measure a training step in trees and in rows, with tiny policies of random weights."""
    require("torch", "train", "what is measured is the trainer")
    from bridle.bench.train import (
        TrainSettings,
        batches,
        bench_policies,
        bench_train,
        one_thread,
    )

    settings = TrainSettings(max_tokens=max_tokens, device=device)
    wanted = set(batch or BatchName)
    one_thread()
    found = []
    with bench_policies(device) as load:
        for each in batches(settings):
            if each.name in wanted:
                err.print(f"{each.name}, {each.layers}: {len(each.items)} samples", highlight=False)
                found.append(bench_train(load(each.layers), each, settings))
    if json:
        print_json([figures.as_data() for figures in found])
        return
    for figures in found:
        out.print(
            f"{figures.batch}, {figures.model} in layout {figures.layout}: "
            f"{figures.tokens_ratio:.1f} times fewer tokens, {figures.step_speedup:.2f} times as "
            f"fast as rows ({figures.seconds:.1f} s), {figures.peak_mib:.0f} MiB "
            f"(rows: {figures.rows_peak_mib:.0f}), gradients within "
            f"{figures.max_rel_grad_diff:.1e}",
            highlight=False,
        )
