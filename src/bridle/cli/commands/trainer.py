"""``bridle trainer``: GRPO with workers, a proxy and engines that run as services."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.extras import needs_extra
from bridle.cli.options import (
    DeviceOption,
    JsonOption,
    LoraRankOption,
    MinutesOption,
    PrecisionOption,
    ProxyOption,
    PublishThroughOption,
    RecomputeOption,
    ScheduleOption,
    SettingsOption,
    StoreOption,
    TransferBackendOption,
    base_urls,
    model_path,
)
from bridle.cli.reading import reader
from bridle.cli.serving import leave_on_sigterm
from bridle.cli.settings import GRPO, chosen
from bridle.cli.terminal import out, print_json
from bridle.run.environment import API_KEY_VARIABLE, admin_key_for, key_in
from bridle.run.holding import LOCK, hold


def trainer(
    context: typer.Context,
    policy: Annotated[
        Path,
        typer.Option(
            parser=model_path, metavar="MODEL", help="Of version 0: directory or Hub name."
        ),
    ],
    engine: Annotated[
        list[str],
        typer.Option(
            callback=base_urls, help="Base URL of an engine that can read --out. Repeatable."
        ),
    ],
    proxy: ProxyOption,
    store: StoreOption,
    worker: Annotated[
        list[str], typer.Option(callback=base_urls, help="A worker's base URL. Repeatable.")
    ],
    output: Annotated[Path, typer.Option("--out", help="Checkpoints, weights, logs.")],
    run: Annotated[str, typer.Option(help="Name of the run; the same name resumes it.")] = "train",
    steps: Annotated[int, typer.Option(min=1, help="GRPO steps.")] = 100,
    seconds: MinutesOption = None,
    groups: Annotated[int, typer.Option(min=1, help="Tasks per step.")] = 8,
    group_size: Annotated[int, typer.Option(min=1, help="Sessions per task.")] = 8,
    learning_rate: Annotated[float, typer.Option(min=0, help="Learning rate of AdamW.")] = 1e-6,
    schedule: ScheduleOption = "constant",
    minibatches: Annotated[int, typer.Option(min=1, help="Updates per step.")] = 1,
    max_staleness: Annotated[
        int, typer.Option(min=0, help="Most policy versions a token may lag behind; 0: on-policy.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Order of minibatches.")] = 0,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    recompute: RecomputeOption = False,
    lora_rank: LoraRankOption = 0,
    publish_through: PublishThroughOption = "directory",
    transfer_address: Annotated[
        str, typer.Option(help="This machine's address for the engines: loopback or private.")
    ] = "127.0.0.1",
    transfer_backend: TransferBackendOption = "gloo",
    settings_file: SettingsOption = None,
    json: JsonOption = False,
) -> None:
    """Train with workers, proxy and engine as services. The same command resumes."""
    with needs_extra("train", "training needs the training extra"):
        from bridle.run.training import TrainingPlan, newest_policy, resumable, step_line, train
    from bridle.run.remote import RemoteWorkers
    from bridle.run.stack import Stack, kind_of
    from bridle.store.errors import NotFound
    from bridle.store.records import RunRecord
    from bridle.store.writing.writer import Writer
    from bridle.trainer.config import GrpoConfig
    from bridle.trainer.report import StepReport

    leave_on_sigterm()
    config = chosen(context, GrpoConfig, GRPO, settings_file)
    context.with_resource(hold(output, output / LOCK))
    admin_key, engine_key = admin_key_for(proxy), key_in(API_KEY_VARIABLE)
    run_id = f"train:{run}"
    with reader(store) as source:
        try:
            source.run(run_id)
        except NotFound:
            with Writer(store) as writer:
                writer.add_sync(RunRecord(run_id, "train", time.time(), name=run))

    def on_step(report: StepReport) -> None:
        if json:
            print_json(report.metrics() | {"step": report.step, "version": report.version})
            return
        out.print(step_line(report), highlight=False, soft_wrap=True)

    plan = TrainingPlan(
        policy=policy,
        directory=output,
        store=store,
        run_id=run_id,
        config=config,
        groups_per_step=groups,
    )
    with resumable():
        stack = Stack(
            engine[0],
            proxy,
            more_engines=tuple(engine[1:]),
            kind=kind_of(engine[0], engine_key),
            engine_key=engine_key,
            admin_key=admin_key,
        )
    with RemoteWorkers(worker, run_id=run_id, group_size=group_size, key=admin_key) as workers:
        loop = train(plan, stack, workers, on_step=on_step)
    if not json:
        out.print(
            f"{newest_policy(plan)}: after {loop.step} of {config.steps} steps",
            highlight=False,
            soft_wrap=True,
        )
