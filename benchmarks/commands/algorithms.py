"""``bridle bench algorithms``: the gradients of all methods beside the exact one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.options import JsonOption
from bridle.cli.terminal import err, out, print_json
from bridle.extras import require


def algorithms(
    method: Annotated[
        list[str] | None, typer.Option(help="A row of the page. Repeatable; default: all.")
    ] = None,
    sessions: Annotated[
        int, typer.Option(min=64, help="Recorded sessions, 32 of which are a batch.")
    ] = 2048,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling policy.")] = 0,
    markdown: Annotated[Path | None, typer.Option(help="Write the page of docs there.")] = None,
    json: JsonOption = False,
) -> None:
    """Compare estimators, losses, corrections and filters with the exactly enumerated gradient."""
    require("torch", "train", "the gradients are the trainer's")
    import torch

    from bridle.bench.algorithms_page import page
    from bridle.recipes.learning.gradients import GradientSettings, bench_gradients
    from bridle.recipes.learning.methods import METHODS

    if unknown := set(method or ()) - {one.name for one in METHODS}:
        names = ", ".join(one.name for one in METHODS)
        raise typer.BadParameter(f"no method {', '.join(sorted(unknown))}: there are {names}")
    torch.set_num_threads(1)  # its tensors are tiny
    settings = GradientSettings(sessions=sessions, seed=seed)
    chosen = [one for one in METHODS if not method or one.name in method]

    def report(line: str) -> None:
        err.print(line)

    found = bench_gradients(settings, chosen, report)
    if markdown is not None:
        markdown.write_text(page(found, settings))
    if json:
        print_json([one.as_data() for one in found])
        return
    for one in found:
        figures = ", ".join(
            f"{point} cosine {each.cosine:.3f} bias {each.bias:.2f} variance {each.variance:.2f}"
            for point, each in one.figures.items()
        )
        out.print(f"{one.method.name}: {figures or one.method.not_compared}")
