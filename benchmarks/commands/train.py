"""``bridle bench train``: the cost of a training step in trees and in rows."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from bridle.cli.options import JsonOption
from bridle.cli.terminal import err, out, print_json
from bridle.extras import require


class BatchName(StrEnum):
    BRANCHING = "branching"
    BRANCHING_HYBRID = "branching_hybrid"
    SHARED_PROMPT = "shared_prompt"
    LINEAR = "linear"


class PrecisionName(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


def train(
    batch: Annotated[
        list[BatchName] | None,
        typer.Option(help="A batch to measure. Repeatable; default: all of them."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a pack, in trees and in rows.")
    ] = 32_768,
    trl: Annotated[
        bool, typer.Option(help="Measure TRL's trainers on the branching batch too.")
    ] = False,
    device: Annotated[str, typer.Option(help="PyTorch's name of it: cpu, cuda.")] = "cpu",
    precision: Annotated[PrecisionName, typer.Option(help="Of forward passes.")] = (
        PrecisionName.FLOAT32
    ),
    hidden: Annotated[int, typer.Option(min=64, help="Width of the policy.")] = 64,
    layers: Annotated[
        int, typer.Option(min=1, help="Layers of the policy; of a hybrid one four at least.")
    ] = 2,
    json: JsonOption = False,
) -> None:
    """Measure a training step in trees and in rows, with policies of random weights."""
    require("torch", "train", "what is measured is the trainer")
    from bridle.bench.train import (
        TrainSettings,
        batches,
        bench_policies,
        bench_train,
        one_thread,
    )

    settings = TrainSettings(
        max_tokens=max_tokens,
        device=device,
        precision=precision.value,
        hidden=hidden,
        layers=layers,
    )
    wanted = set(batch or BatchName)
    one_thread()
    found = {}
    with bench_policies(settings) as load:
        for each in batches(settings):
            if each.name in wanted:
                err.print(f"{each.name}: {len(each.items)} samples", highlight=False)
                found[each.name] = bench_train(load(each.model), each, settings)
    beside = None
    if trl:
        require("trl", "dev", "TRL's trainers are measured beside ours")
        from bridle.bench.train_trl import bench_trl

        err.print("branching, by TRL", highlight=False)
        beside = bench_trl(settings)
    if json:
        data = {name: figures.as_data() for name, figures in found.items()}
        print_json(data if beside is None else {**data, "trl": beside.as_data()})
        return
    for name, figures in found.items():
        out.print(
            f"{name} ({figures.model}, in layout {figures.layout}): "
            f"{figures.tokens_ratio:.1f} times fewer tokens, {figures.step_speedup:.2f} times as "
            f"fast as rows ({figures.seconds:.1f} s), {figures.peak_mib:.0f} MiB "
            f"(rows: {figures.rows_peak_mib:.0f}), gradients within "
            f"{figures.max_rel_grad_diff:.1e}",
            highlight=False,
        )
    if beside is not None:
        out.print(
            f"TRL {beside.version}: {beside.step_speedup:.2f} times as fast as its rows "
            f"({beside.rows_seconds:.1f} s), {beside.trees_step_speedup:.2f} times as fast as its "
            f"trees ({beside.trees_seconds:.1f} s)",
            highlight=False,
        )
