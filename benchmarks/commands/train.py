"""``bridle bench train``: the cost of a training step in trees and in rows."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from bridle.cli.options import JsonOption
from bridle.cli.terminal import err, out, print_json
from bridle.extras import require


class BatchName(StrEnum):
    BRANCHING = "branching"
    BRANCHING_HYBRID = "branching_hybrid"
    SHARED_PROMPT = "shared_prompt"
    LINEAR = "linear"


class ShapeName(StrEnum):
    TINY = "tiny"
    M300 = "300m"
    B4 = "4b"


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
    shape: Annotated[
        ShapeName, typer.Option(help="Shape of the policy; 4b is that of Qwen3-4B.")
    ] = ShapeName.TINY,
    lora_rank: Annotated[
        int, typer.Option(min=0, help="Rank of the adapters to train; 0: all weights.")
    ] = 0,
    recompute: Annotated[
        bool, typer.Option(help="Recompute activations in the backward pass.")
    ] = False,
    longest: Annotated[
        int | None,
        typer.Option(
            min=16_384,
            help="Find the longest session, of up to so many tokens, that an accelerator trains.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure a training step in trees and in rows, with policies of random weights."""
    require("torch", "train", "what is measured is the trainer")
    from bridle.bench.longest import measure_longest
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
        shape=shape.value,
        lora_rank=lora_rank,
        recompute=recompute,
    )
    wanted = set(batch or (() if longest else BatchName))
    if device == "cpu":
        one_thread()
    found = {}
    alone: dict[str, Any] = {}
    with bench_policies(settings) as load:
        for each in batches(settings):
            if each.name in wanted:
                err.print(f"{each.name}: {len(each.items)} samples")
                figures = bench_train(load(each.model), each, settings)
                found[each.name] = figures
                err.print(
                    f"{figures.seconds:.2f} s, in rows {figures.rows_seconds:.2f} s; "
                    f"{figures.peak_mib:.0f} MiB, in rows {figures.rows_peak_mib:.0f} MiB"
                )
        if longest:
            alone = measure_longest(load, settings, longest, err.print)
    beside = None
    if trl:
        require("trl", "dev", "TRL's trainers are measured beside ours")
        from bridle.bench.train_trl import bench_trl

        err.print("branching, by TRL")
        beside = bench_trl(settings)
    if json:
        data = {name: figures.as_data() for name, figures in found.items()} | alone
        print_json(data if beside is None else {**data, "trl": beside.as_data()})
        return
    for name, figures in found.items():
        out.print(
            f"{name} ({figures.model}, in layout {figures.layout}): "
            f"{figures.tokens_ratio:.1f} times fewer tokens, {figures.step_speedup:.2f} times as "
            f"fast as rows ({figures.seconds:.1f} s), {figures.peak_mib:.0f} MiB "
            f"(rows: {figures.rows_peak_mib:.0f}), gradients within "
            f"{figures.max_rel_grad_diff:.1e}"
        )
    for name, values in alone.items():
        shown = ", ".join(f"{key} {value}" for key, value in values.items())
        out.print(f"{name}: {shown}")
    if beside is not None:
        out.print(
            f"TRL {beside.version}: {beside.step_speedup:.2f} times as fast as its rows "
            f"({beside.rows_seconds:.1f} s), {beside.trees_step_speedup:.2f} times as fast as its "
            f"trees ({beside.trees_seconds:.1f} s)"
        )
