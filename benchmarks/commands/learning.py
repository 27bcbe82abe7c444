"""``bridle bench learning``: the sessions that it takes to learn a task.

They are counted for estimators, losses, corrections and filters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bridle.cli.options import JsonOption
from bridle.cli.terminal import err, out, print_json
from bridle.extras import require

if TYPE_CHECKING:
    from bridle.recipes.learning.runs import LearningFigures, LearningSettings


def learning(
    case: Annotated[
        list[str] | None,
        typer.Option(help="A method. Repeatable; default: all, and the default in any case."),
    ] = None,
    scenario: Annotated[
        list[str] | None, typer.Option(help="A scenario. Repeatable; default: all.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each method in a scenario.")] = 10,
    first_seed: Annotated[int, typer.Option(min=0, help="Of the seeds, which count up.")] = 0,
    pretrained: Annotated[
        bool,
        typer.Option(
            "--pretrained",
            help="Train the demo's SmolLM2-135M instead: minutes for each run of a method.",
        ),
    ] = False,
    device: Annotated[
        str, typer.Option(help="Of --pretrained's trainer and engine: cpu, cuda, cuda:1.")
    ] = "cpu",
    step: Annotated[
        str,
        typer.Option(metavar="GROUPSxSIZE", help="Of --pretrained's steps: groups of sessions."),
    ] = "8x8",
    table: Annotated[
        Path | None,
        typer.Option(
            help="Write the page of docs there; measures staleness and refill too, but not with "
            "--pretrained."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Count the sessions that each method needs to learn, beside what its paper leads to expect.

    Policies learn either tasks that are made by rule, or the demo's questions.
    """
    require("torch", "train", "what learns is the trainer's")
    import torch

    from bridle.recipes.learning.methods import METHODS
    from bridle.recipes.learning.runs import LearningSettings, judged
    from bridle.recipes.learning.scenarios import SCENARIOS

    _known("method", case, [one.name for one in METHODS])
    _known("scenario", scenario, [one.name for one in SCENARIOS])
    settings = LearningSettings(seeds=seeds, first_seed=first_seed)
    if pretrained:
        found = _on_smollm2(case, settings, step, device, table)
    else:
        torch.set_num_threads(1)  # its tensors are tiny
        found = _by_rule(case, scenario, settings, table)
    results = judged(found)
    if json:
        print_json(
            {
                "figures": [one.as_data() for one in found],
                "expectations": [one.as_data() for one in results],
            }
        )
        return
    for one in found:
        reached = "not reached" if one.sessions is None else f"{one.sessions:.0f} sessions"
        ratio = "" if one.ratio is None else f", {one.ratio:.2f} of the first's"
        out.print(f"{one.scenario}: {one.name}: {reached}{ratio}")
    for each in results:
        expected, ratio = each.expectation, "none" if each.ratio is None else f"{each.ratio:.2f}"
        out.print(
            f"{'met' if each.met else 'missed'}: {expected.method} in {expected.scenario}: "
            f"{expected.bound} of {expected.against}'s sessions, measured {ratio}"
        )


def _known(kind: str, chosen: Sequence[str] | None, known: Sequence[str]) -> None:
    if unknown := set(chosen or ()) - set(known):
        raise typer.BadParameter(
            f"no {kind} {', '.join(sorted(unknown))}: there are {'; '.join(known)}"
        )


def _report(line: str) -> None:
    err.print(line)


def _by_rule(
    chosen: Sequence[str] | None,
    scenarios: Sequence[str] | None,
    settings: LearningSettings,
    table: Path | None,
) -> list[LearningFigures]:
    """Run the methods in the tasks that are made by rule."""
    from bridle.bench import learning_page
    from bridle.recipes.learning.runs import bench_learning
    from bridle.recipes.learning.scenarios import DEFAULT, SCENARIOS, methods_of

    found: list[LearningFigures] = []
    for world in SCENARIOS:
        names = [
            one for one in methods_of(world.name) if not chosen or one in chosen or one == DEFAULT
        ]
        if (not scenarios or world.name in scenarios) and (not chosen or len(names) > 1):
            found += bench_learning(world, names, settings, _report)
    if table is not None:
        _report("staleness and refill")
        bounds, refills = learning_page.measured()
        table.write_text(learning_page.page(found, bounds, refills, settings))
    return found


def _on_smollm2(
    chosen: Sequence[str] | None,
    settings: LearningSettings,
    step: str,
    device: str,
    table: Path | None,
) -> list[LearningFigures]:
    """Run the methods on the demo's model."""
    size = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", step)
    if size is None:
        raise typer.BadParameter(f"--step {step}: write groups and their size, such as 4x4")
    require("langchain_openai", "dev", "the demo's agent is a LangChain app")
    from bridle.recipes.learning import pretrained
    from bridle.recipes.learning.methods import method
    from bridle.recipes.learning.runs import compared

    demo = pretrained.demo_settings(int(size[1]), int(size[2]), device)
    needed: dict[str, list[int | None]] = {}
    for name in dict.fromkeys(["grpo", *(chosen or pretrained.CASES)]):
        _report(name)
        needed[name] = pretrained.bench_pretrained(method(name), settings, demo, _report)
    found = compared("demo", needed)
    if table is not None:
        table.write_text(pretrained.table(found, settings, demo))
    return found
