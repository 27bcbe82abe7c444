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
)
from bridle.cli.reading import reader, require_run
from bridle.cli.serving import leave_on_sigterm
from bridle.cli.settings import GRPO, chosen
from bridle.cli.terminal import fail, out, print_json
from bridle.run.environment import API_KEY_VARIABLE, admin_key_for, key_in
from bridle.run.holding import LOCK, hold


def trainer(
    context: typer.Context,
    policy: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="Model directory of version 0.")
    ],
    proxy: ProxyOption,
    store: StoreOption,
    output: Annotated[Path, typer.Option("--out", help="Checkpoints, weights, logs.")],
    engine: Annotated[
        list[str] | None,
        typer.Option(
            callback=base_urls, help="Base URL of an engine that can read --out. Repeatable."
        ),
    ] = None,
    worker: Annotated[
        list[str] | None,
        typer.Option(callback=base_urls, help="A worker's base URL. Repeatable."),
    ] = None,
    from_store: Annotated[
        bool, typer.Option("--from-store", help="Train sessions that are recorded already.")
    ] = False,
    where: Annotated[
        str | None,
        typer.Option(help="--from-store: SQL on the columns of sessions, harness = 'pi'."),
    ] = None,
    version: Annotated[
        int, typer.Option(min=0, help="--from-store: the recorded version that --policy is.")
    ] = 0,
    wait: Annotated[
        bool, typer.Option("--wait", help="--from-store: wait for --group-size rewarded sessions.")
    ] = False,
    other_policy: Annotated[
        bool, typer.Option("--other-policy", help="--from-store: sessions of other weights too.")
    ] = False,
    run: Annotated[
        str | None,
        typer.Option(
            help="Name of the run, which the same name resumes; default: train. "
            "--from-store: only this recorded run's sessions."
        ),
    ] = None,
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
    """Train with workers, proxy and engine as services, or on recorded sessions.

    The same command resumes. --from-store needs no engine; with one, each version is published.
    """
    with needs_extra("train", "training needs the training extra"):
        from bridle.run.training import TrainingPlan, newest_policy, resumable, step_line, train
    from bridle.run.recorded import Recordings, train_recorded
    from bridle.run.remote import RemoteWorkers
    from bridle.run.stack import Stack, kind_of
    from bridle.store.errors import NotFound
    from bridle.store.records import RunRecord
    from bridle.store.writing.writer import Writer
    from bridle.trainer.config import GrpoConfig
    from bridle.trainer.report import StepReport

    leave_on_sigterm()
    config = chosen(context, GrpoConfig, GRPO, settings_file)
    if not from_store:
        refuse_without_store(where=where, wait=wait, version=version, other_policy=other_policy)
        if not engine or not worker:
            fail("name --engine and --worker, or --from-store", 2)
    context.with_resource(hold(output, output / LOCK))
    admin_key, engine_key = admin_key_for(proxy), key_in(API_KEY_VARIABLE)
    name = output.name if from_store else run or "train"
    run_id = f"train:{name}"
    with reader(store) as source:
        if from_store:
            require_run(source, run)
        try:
            source.run(run_id)
        except NotFound:
            with Writer(store) as writer:
                writer.add_sync(RunRecord(run_id, "train", time.time(), name=name))

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
    stack = None
    if engine:
        with resumable():
            stack = Stack(
                engine[0],
                proxy,
                more_engines=tuple(engine[1:]),
                kind=kind_of(engine[0], engine_key),
                engine_key=engine_key,
                admin_key=admin_key,
            )
    if from_store:
        recordings = Recordings(run, where, version, group_size if wait else None, other_policy)
        loop = train_recorded(plan, recordings, stack=stack, on_step=on_step)
    elif stack is not None and worker:
        with RemoteWorkers(worker, run_id=run_id, group_size=group_size, key=admin_key) as workers:
            loop = train(plan, stack, workers, on_step=on_step)
    if not json:
        out.print(
            f"{newest_policy(plan)}: after {loop.step} of {loop.config.steps} steps",
            highlight=False,
            soft_wrap=True,
        )


def refuse_without_store(**options: object) -> None:
    """Ends the command when an option was given that is for recorded sessions only."""
    for name, value in options.items():
        if value:
            fail(f"--{name.replace('_', '-')} is for --from-store", 2)
