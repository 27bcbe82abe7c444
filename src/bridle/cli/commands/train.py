"""``bridle train``: train an agent of your own by GRPO."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bridle.cli.commands.doctor import print_findings
from bridle.cli.options import (
    TASKS_HELP,
    ConfigOption,
    DeviceOption,
    EngineOption,
    FleetOption,
    LoraRankOption,
    MinutesOption,
    PrecisionOption,
    PublishThroughOption,
    RecomputeOption,
    SamplingOption,
    SandboxOption,
    ScheduleOption,
    SetOption,
    TransferBackendOption,
)
from bridle.cli.serving import leave_on_sigterm
from bridle.cli.settings import RUN, chosen
from bridle.cli.terminal import err, out
from bridle.extras import needs_extra
from bridle.store.reading.queries import Reader

if TYPE_CHECKING:
    from bridle.trainer.report import StepReport


def train(
    context: typer.Context,
    output: Annotated[Path, typer.Option("--out", help="Store, checkpoints, weights, logs.")],
    policy: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Model directory of version 0."),
    ] = None,
    named: Annotated[
        str | None,
        typer.Option("--agent", help="codex, claude-code …, agent.py, or 'CMD {prompt}'."),
    ] = None,
    tasks: Annotated[str | None, typer.Option(help=TASKS_HELP)] = None,
    verify: Annotated[
        str | None, typer.Option("--verifier", help="task, number, exact, regex, or FILE.py:NAME.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Only tasks of this split.")] = None,
    sandbox: SandboxOption = None,
    fleet: FleetOption = "local",
    sampling: SamplingOption = "policy",
    steps: Annotated[int, typer.Option(min=1, help="GRPO steps.")] = 100,
    seconds: MinutesOption = None,
    groups: Annotated[int, typer.Option(min=1, help="Tasks per step.")] = 8,
    group_size: Annotated[int, typer.Option(min=1, help="Sessions per task.")] = 8,
    parallel: Annotated[int, typer.Option(min=1, help="Sessions at a time.")] = 16,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Longest time of one session, in seconds.")
    ] = 600.0,
    learning_rate: Annotated[float, typer.Option(min=0, help="Learning rate of AdamW.")] = 1e-6,
    schedule: ScheduleOption = "constant",
    minibatches: Annotated[int, typer.Option(min=1, help="Updates per step.")] = 1,
    max_staleness: Annotated[
        int, typer.Option(min=0, help="Most policy versions a token may lag behind; 0: on-policy.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Order of tasks and minibatches.")] = 0,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    recompute: RecomputeOption = False,
    lora_rank: LoraRankOption = 0,
    evaluate_every: Annotated[
        int,
        typer.Option(min=0, help="Steps between measurements on held-out tasks; 0: none."),
    ] = 0,
    evaluation_split: Annotated[
        str | None, typer.Option(help="Split of the held-out tasks, of --tasks or [evaluation].")
    ] = None,
    engine: EngineOption = "embedded",
    engine_arguments: Annotated[
        list[str] | None,
        typer.Option(
            "--engine-arg", help="An option of `bridle engine`: --max-model-len=N. Repeatable."
        ),
    ] = None,
    publish_through: PublishThroughOption = "directory",
    transfer_backend: TransferBackendOption = "gloo",
    config_file: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Train a policy inside an agent. The same command resumes from the last checkpoint.

    --policy, --agent and --tasks are required, here or in --config.
    """
    from bridle.run.config import RunConfig

    config = chosen(context, RunConfig, RUN, config_file, assignments or ())
    with needs_extra("train", "training needs the training extra"):  # torch takes seconds to load
        from bridle.cli.ranks import run_on_each_device
        from bridle.diagnosis.findings import findings_of_run
        from bridle.run import local
        from bridle.run.report import report_lines
        from bridle.run.training import step_line
        from bridle.run.training_progress import TrainingProgress

    run_on_each_device(config.training.compute.device)
    leave_on_sigterm()
    progress = TrainingProgress(config.training.steps, _print_line)

    def on_step(report: StepReport) -> None:
        progress.step_ended()
        _print_line(step_line(report))

    try:
        result = local.train(
            config,
            output,
            on_begin=progress.begin,
            on_session=progress.session_ended,
            on_step=on_step,
            on_rule=_print_line,
        )
    except KeyboardInterrupt:
        err.print("\nStopped. The same command resumes from the last whole step.")
        raise typer.Exit(130) from None
    out.print(
        f"{result.policy}: after {result.steps} of {config.training.steps} steps",
        highlight=False,
        soft_wrap=True,
    )
    for line in report_lines(result.report):
        out.print(line, highlight=False, soft_wrap=True)
    out.print(f"report: {output / 'report.json'}   plot: {output / 'reward.png'}", soft_wrap=True)
    with Reader(result.store) as source:
        print_findings(f"run {result.run_id}", findings_of_run(source, result.run_id))


def _print_line(line: str) -> None:
    out.print(line, highlight=False, soft_wrap=True)
