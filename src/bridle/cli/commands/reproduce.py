"""``bridle reproduce``: train an installed coding agent on file edits; measure before and after."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from bridle.cli.options import EngineOption, JsonOption
from bridle.cli.serving import leave_on_sigterm
from bridle.cli.terminal import err, fail, out, print_json
from bridle.extras import needs_extra


def reproduce(
    named: Annotated[
        str, typer.Argument(help="codex, claude-code, qwen-code, pi or mini-swe-agent.")
    ] = "codex",
    harness: Annotated[str | None, typer.Option(help="The same, as an option.")] = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Output folder. Default: runs/HARNESS.")
    ] = None,
    fresh: Annotated[bool, typer.Option(help="Delete an earlier run in the folder first.")] = False,
    engine: EngineOption = "vllm",
    seed: Annotated[int, typer.Option(help="Seed of the policy, the tasks and their order.")] = 0,
    teacher_sessions: Annotated[int | None, typer.Option(min=1, help="Demonstrations.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Largest number of GRPO steps.")] = None,
    groups: Annotated[int | None, typer.Option(min=1, help="Tasks per step.")] = None,
    group_size: Annotated[int | None, typer.Option(min=1, help="Sessions per task.")] = None,
    eval_tasks: Annotated[
        int | None, typer.Option(min=1, help="Held-out tasks; at most 100 of them greedily.")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0, help="Longest time of the whole run; measurements that have begun are completed."
        ),
    ] = None,
    parallel: Annotated[int | None, typer.Option(min=1, help="Sessions at a time.")] = None,
    containers: Annotated[
        bool,
        typer.Option(
            "--containers", help="Write the tasks as Harbor folders; a container for each session."
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Train a tiny policy inside a real coding agent: fine-tuning on demonstrations, then GRPO."""
    with needs_extra("train", "this command needs the training extra"):
        from bridle.recipes.demo.run import Demo
    from bridle.recipes.demo.state import start_afresh
    from bridle.recipes.reproduce.course import HARNESSES, Editing, settings_for

    chosen = harness or named
    if chosen not in HARNESSES:
        fail(f"there is {', '.join(HARNESSES)}, not {chosen!r}", 2)
    directory = out_dir or Path("runs") / (f"{chosen}-containers" if containers else chosen)
    if fresh:
        start_afresh(directory)
    asked: dict[str, Any] = {
        "engine": engine,
        "seed": seed,
        "teacher_sessions": teacher_sessions,
        "max_steps": steps,
        "groups": groups,
        "group_size": group_size,
        "eval_tasks": eval_tasks,
        "minutes": minutes,
        "parallel": parallel,
    }
    settings = dataclasses.replace(
        settings_for(chosen), **{name: value for name, value in asked.items() if value is not None}
    )
    leave_on_sigterm()
    course = Editing(chosen, directory / "tasks" if containers else None)
    run = Demo(directory, settings, err if json else out, course)
    if run.finished:
        report = orjson.loads((directory / "report.json").read_bytes())
        run.show(report)
    else:
        try:
            report = run.run()
        except KeyboardInterrupt:
            err.print("\nStopped. The same command resumes.")
            raise typer.Exit(130) from None
    if json:
        print_json(report)
