"""``bridle bench learning``: the sessions that it takes to learn a task.

They are counted for estimators, losses and settings.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bridle.cli.options import JsonOption
from bridle.cli.terminal import err, out, print_json
from bridle.extras import require

if TYPE_CHECKING:
    from bridle.recipes.learning.sparse import LearningSettings


def learning(
    case: Annotated[
        list[str] | None,
        typer.Option(help="A row of the table. Repeatable; default: all, the default first."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each case.")] = 3,
    first_seed: Annotated[int, typer.Option(min=0, help="Of the seeds, which count up.")] = 0,
    pretrained: Annotated[
        bool,
        typer.Option(
            "--pretrained",
            help="Train the demo's SmolLM2-135M instead: minutes for each run of a case.",
        ),
    ] = False,
    branched: Annotated[
        bool,
        typer.Option(
            "--branched",
            help="Count sampled tokens with groups of siblings, on the task with history in its "
            "prompts.",
        ),
    ] = False,
    device: Annotated[
        str, typer.Option(help="Of --pretrained's trainer and engine: cpu, cuda, cuda:1.")
    ] = "cpu",
    table: Annotated[
        Path | None,
        typer.Option(
            help="Write the table of docs there; measures staleness and refill too, but not with "
            "--pretrained."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Count the sessions that each case needs to learn.

    They learn either a sparse task of ten steps, made by rule, or the demo's questions.
    """
    require("torch", "train", "what learns is the trainer's")
    from bridle.recipes.learning.sparse import LearningSettings, bench_learning, cases, compared

    settings = LearningSettings(seeds=seeds, first_seed=first_seed)
    if branched:
        _branched(settings, json)
        return
    known = cases()
    if unknown := set(case or ()) - {each.name for each in known}:
        names = ", ".join(each.name for each in known)
        raise typer.BadParameter(f"no case {', '.join(sorted(unknown))}: there are {names}")
    if pretrained:
        require("langchain_openai", "dev", "the demo's agent is a LangChain app")
        from bridle.recipes.learning import pretrained as on_smollm2

        case = case or [*on_smollm2.CASES]
    needed: dict[str, list[int | None]] = {}
    for each in known:
        if each is known[0] or not case or each.name in case:
            err.print(each.name, highlight=False)
            needed[each.name] = (
                on_smollm2.bench_pretrained(each, settings, device, err.print)
                if pretrained
                else bench_learning(each, settings)
            )
    found = compared(needed)
    if table is not None and pretrained:
        table.write_text(on_smollm2.table(found, settings))
    elif table is not None:
        from bridle.bench import learning_table

        err.print("staleness and refill", highlight=False)
        bounds, refills = learning_table.measured()
        table.write_text(learning_table.table(found, bounds, refills, settings))
    if json:
        print_json([figures.as_data() for figures in found])
        return
    for figures in found:
        reached = "not reached" if figures.sessions is None else f"{figures.sessions:.0f} sessions"
        ratio = "" if figures.ratio is None else f", {figures.ratio:.2f} of the default's"
        out.print(f"{figures.name}: {reached}{ratio}", highlight=False)


def _branched(settings: LearningSettings, json: bool) -> None:
    """Print the sampled tokens of each seed of the cases with siblings."""
    from bridle.recipes.learning.branched import CASES, tokens_to_goal

    found = {
        case.name: [tokens_to_goal(case, settings, seed) for seed in settings.every_seed]
        for case in CASES
    }
    if json:
        print_json(found)
        return
    for name, tokens in found.items():
        seeds = ", ".join("not reached" if one is None else str(one) for one in tokens)
        out.print(f"{name}: sampled tokens {seeds}", highlight=False)
