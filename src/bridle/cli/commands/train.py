"""``bridle train``: train an agent of your own by GRPO, or train on recorded sessions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from bridle.cli.commands.doctor import print_findings
from bridle.cli.reading import reader, require_run
from bridle.cli.serving import leave_on_sigterm
from bridle.cli.settings import configured
from bridle.cli.terminal import err, out
from bridle.extras import needs_extra
from bridle.run.config import RunConfig
from bridle.store.reading.queries import Reader

if TYPE_CHECKING:
    from bridle.trainer.report import StepReport


FLAGS: Final = {
    "--policy": "policy.model",
    "--agent": "agent.name",
    "--unsafe-sandbox": "agent.unsafe_sandbox",
    "--tasks": "tasks.source",
    "--verifier": "tasks.verifier",
    "--steps": "training.steps",
    "--engine-url": "services.engine_urls",
    "--proxy-url": "services.proxy_url",
    "--from-store": "recordings.store",
}


@configured(RunConfig, FLAGS)
def train(
    output: Annotated[Path, typer.Option("--out", help="Checkpoints, weights, logs, own store.")],
    config: RunConfig,
) -> None:
    """Train a policy inside an agent; run again, it resumes.

    It starts an engine and a proxy, or uses those of --engine-url and --proxy-url. --from-store
    trains recorded sessions: it needs neither an agent nor an engine.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # not one of several processes
        where = f"inside {config.agent.name}" if config.agent.name else "on recorded sessions"
        begun = f"training {config.policy.model} {where}, into {output}"
        out.print(f"{begun}; PyTorch is loaded first")
    with needs_extra("train", "training needs the training extra"):  # torch takes seconds to load
        from bridle.cli.ranks import run_on_each_device
        from bridle.diagnosis.findings import findings_of_run
        from bridle.run import local
        from bridle.run.report import report_lines
        from bridle.run.requirements import require_training
        from bridle.run.training import step_line
        from bridle.run.training_progress import TrainingProgress

    require_training(config)
    if (named := config.recordings.store or config.shared_store) is not None:
        with reader(named) as source:
            require_run(source, config.recordings.run)
    run_on_each_device(config.training.compute.device)
    leave_on_sigterm()
    progress = TrainingProgress(config.training.steps, out.print)

    def on_step(report: StepReport) -> None:
        out.print(step_line(report))
        progress.step_ended(report.step, report.metrics())

    try:
        result = local.train(
            config,
            output,
            on_begin=progress.begin,
            on_session=progress.session_ended,
            on_step=on_step,
            on_rule=out.print,
        )
    except KeyboardInterrupt:
        err.print("\nStopped. The same command resumes from the last whole step.")
        raise typer.Exit(130) from None
    out.print(f"{result.policy}: after {result.steps} of {result.planned} steps")
    for line in report_lines(result.report):
        out.print(line)
    out.print(f"report: {output / 'report.json'}   plot: {output / 'reward.png'}")
    with Reader(result.store) as source:
        print_findings(f"run {result.run_id}", findings_of_run(source, result.run_id))
