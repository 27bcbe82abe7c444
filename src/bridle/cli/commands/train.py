"""``bridle train``: GRPO on an agent of your own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.holding import LOCK, hold
from bridle.cli.options import (
    DeviceOption,
    EngineOption,
    LoraRankOption,
    MinutesOption,
    PrecisionOption,
    PublishThroughOption,
    RecomputeOption,
    ScheduleOption,
    SettingsOption,
    TransferBackendOption,
)
from bridle.cli.reading import migrated
from bridle.cli.terminal import fail, out
from bridle.run.serving import leave_on_sigterm
from bridle.run.settings_file import GRPO, SettingsError, chosen


def train(
    context: typer.Context,
    policy: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="Model directory of version 0.")
    ],
    named: Annotated[
        str,
        typer.Option("--agent", help="codex, claude-code …, agent.py, or 'CMD {prompt}'."),
    ],
    tasks: Annotated[str, typer.Option(help="FILE.jsonl, FILE.py:FUNCTION or MODULE:FUNCTION.")],
    verify: Annotated[
        str, typer.Option("--verifier", help="number, exact, regex, or FILE.py:NAME.")
    ],
    output: Annotated[Path, typer.Option("--out", help="Store, checkpoints, weights, logs.")],
    split: Annotated[str | None, typer.Option(help="Only tasks of this split.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="GRPO steps.")] = 100,
    seconds: MinutesOption = None,
    groups: Annotated[int, typer.Option(min=1, help="Tasks per step.")] = 8,
    group_size: Annotated[int, typer.Option(min=1, help="Sessions per task.")] = 8,
    parallel: Annotated[int, typer.Option(min=1, help="Sessions at a time.")] = 16,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one session.")] = 600.0,
    learning_rate: Annotated[float, typer.Option(min=0, help="Of AdamW.")] = 1e-6,
    schedule: ScheduleOption = "constant",
    minibatches: Annotated[int, typer.Option(min=1, help="Updates per step.")] = 1,
    max_staleness: Annotated[int, typer.Option(min=0, help="0: on-policy.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Order of tasks and minibatches.")] = 0,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    recompute: RecomputeOption = False,
    lora_rank: LoraRankOption = 0,
    engine: EngineOption = "embedded",
    engine_arguments: Annotated[
        list[str] | None,
        typer.Option("--engine-arg", help="Of `bridle engine`, as --max-model-len=N. Repeatable."),
    ] = None,
    publish_through: PublishThroughOption = "directory",
    transfer_backend: TransferBackendOption = "gloo",
    settings_file: SettingsOption = None,
) -> None:
    """Train a policy inside an agent. Run again to go on from the last checkpoint."""
    from bridle.run.agents import training_work
    from bridle.trainer.config import GrpoConfig

    try:
        config = chosen(context, GrpoConfig, GRPO, settings_file)
    except SettingsError as error:
        fail(str(error), 2)
    if config.publish.through == "transfer" and engine != "vllm":
        fail("weights are transferred to a vLLM only: add --engine vllm", 2)
    adapter, runtime, check, pool = training_work(named, verify, tasks, split, config.seed)
    # Imports torch, which takes seconds.
    try:
        from bridle.run.training import TrainingPlan, last_line, require_devices, step_line
        from bridle.run.training import train as train_plan
    except ImportError as error:
        fail(f"training needs the training extra: pip install 'bridle[train]' ({error})")
    from bridle.engine.contract.client import EngineError
    from bridle.engine.contract.tokenizer import Tokenizer, TokenizerNotRead
    from bridle.harnesses.client import ControlError
    from bridle.harnesses.rollout import Job, Settings, grouped, require_launchable
    from bridle.harnesses.sandboxes.base import NotLaunchable
    from bridle.run.rollouts import Rollouts
    from bridle.run.services import ServiceFailed
    from bridle.run.stack import MODEL, StackError, stack
    from bridle.store.reading.queries import Reader
    from bridle.store.records import RunRecord, new_id
    from bridle.store.writing.writer import Writer
    from bridle.trainer.learner.checkpoint import CheckpointError
    from bridle.trainer.learner.group import LearnerFailed
    from bridle.trainer.policy.compute import UnsupportedCompute
    from bridle.trainer.policy.durable import NotWritten
    from bridle.trainer.policy.model import UnsupportedModel, check_policy
    from bridle.trainer.publish.swap import PublishError
    from bridle.trainer.report import StepReport

    leave_on_sigterm()
    try:
        check_policy(policy)
        require_devices(config)
        Tokenizer(policy)
        require_launchable(adapter, pool[0], Settings(directory=output / "sessions"))
    except (UnsupportedModel, UnsupportedCompute, TokenizerNotRead, NotLaunchable) as error:
        fail(str(error))
    hold(context, output, output / LOCK)
    store = str(output / "bridle.db")
    migrated(store)
    with Reader(store) as reader:
        earlier = reader.runs("train")
    run_id = earlier[-1].id if earlier else new_id("run")
    if not earlier:
        with Writer(store) as writer:
            writer.create_run(RunRecord(run_id, "train", time.time(), name=adapter.name))

    def jobs(step: int) -> list[Job]:
        chosen = [pool[(step * groups + index) % len(pool)] for index in range(groups)]
        return list(grouped(chosen, group_size))

    def on_step(report: StepReport) -> None:
        out.print(step_line(report), highlight=False, soft_wrap=True)

    plan = TrainingPlan(
        policy=policy,
        directory=output,
        store=store,
        run_id=run_id,
        config=config,
    )
    settings = Settings(
        directory=output / "sessions",
        parallel=parallel,
        timeout_s=timeout,
        model=MODEL,
        run_id=run_id,
    )
    try:
        with (
            stack(
                policy,
                store,
                output / "logs",
                engine=engine,
                engine_arguments=engine_arguments or (),
            ) as running,
            Rollouts(running.proxy_url, runtime, check) as rollouts,
        ):
            loop = train_plan(
                plan,
                running,
                lambda step: rollouts.sessions(adapter, jobs(step), settings),
                on_step=on_step,
            )
    except (
        ServiceFailed,
        NotLaunchable,
        CheckpointError,
        UnsupportedModel,
        UnsupportedCompute,
    ) as error:
        fail(str(error))
    except (
        ControlError,
        EngineError,
        LearnerFailed,
        NotWritten,
        PublishError,
        StackError,
    ) as error:
        fail(f"{error}; the same command goes on from the last step")
    out.print(last_line(plan, loop), highlight=False, soft_wrap=True)
