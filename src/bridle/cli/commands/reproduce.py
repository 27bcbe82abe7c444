"""``bridle reproduce``: train an installed coding agent on file edits; measure before and after."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.options import EngineOption, JsonOption
from bridle.cli.serving import leave_on_sigterm
from bridle.cli.settings import SetOption, settable
from bridle.cli.terminal import err, fail, out, print_json
from bridle.extras import needs_extra


@settable("bridle.recipes.demo.settings:DemoSettings")
def reproduce(
    harness: Annotated[
        str, typer.Argument(help="codex, claude-code, qwen-code, pi or mini-swe-agent.")
    ] = "codex",
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Output folder. Default: runs/HARNESS.")
    ] = None,
    fresh: Annotated[bool, typer.Option(help="Delete an earlier run in the folder first.")] = False,
    start_from: Annotated[
        Path | None, typer.Option(help="Start from the fine-tuned policy of this earlier run.")
    ] = None,
    edits: Annotated[int, typer.Option(min=1, help="Number of edits in a task.")] = 1,
    engine: EngineOption = "vllm",
    steps: Annotated[int | None, typer.Option(min=1, help="Maximum number of GRPO steps.")] = None,
    containers: Annotated[
        bool,
        typer.Option(
            "--containers", help="Write the tasks as Harbor folders; a container for each session."
        ),
    ] = False,
    assignments: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Train a tiny policy inside a real coding agent.

    The policy is fine-tuned on demonstrations first, then trained by GRPO.
    """
    with needs_extra("train", "this command needs the training extra"):
        from bridle.recipes.demo.run import Demo
    from bridle.recipes.demo.settings import with_changes
    from bridle.recipes.demo.state import start_afresh
    from bridle.recipes.reproduce.course import HARNESSES, Editing, settings_for

    if harness not in HARNESSES:
        fail(f"there is {', '.join(HARNESSES)}, not {harness!r}", 2)
    settings = replace(settings_for(harness), engine=engine)
    if steps is not None:
        settings = replace(settings, max_steps=steps)
    settings = with_changes(settings, assignments or ())
    directory = out_dir or Path("runs") / (f"{harness}-containers" if containers else harness)
    if fresh:
        start_afresh(directory)
    leave_on_sigterm()
    course = Editing(harness, directory / "tasks" if containers else None, edits)
    run = Demo(directory, settings, err if json else out, course)
    if start_from is not None:
        run.start_from(start_from)
    try:
        report = run.run()
    except KeyboardInterrupt:
        err.print("\nStopped. The same command resumes.")
        raise typer.Exit(130) from None
    if json:
        print_json(report)
