"""``bridle trainer``: GRPO with a proxy and engines that run as services."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.options import (
    TASKS_HELP,
    DeviceOption,
    FleetOption,
    JsonOption,
    LoraRankOption,
    MinutesOption,
    PrecisionOption,
    ProxyOption,
    PublishThroughOption,
    RecomputeOption,
    SamplingOption,
    SandboxOption,
    ScheduleOption,
    SettingsOption,
    StoreOption,
    TransferBackendOption,
    base_urls,
    model_path,
)
from bridle.cli.reading import reader, require_run
from bridle.cli.serving import leave_on_sigterm
from bridle.cli.settings import GRPO, chosen
from bridle.cli.terminal import err, fail, out, print_json
from bridle.extras import needs_extra
from bridle.run.environment import (
    API_KEY_VARIABLE,
    admin_key_for,
    key_in,
    private_in,
    store_files,
)
from bridle.run.holding import LOCK, hold
from bridle.store.records import DEFAULT_POLICY


def trainer(
    context: typer.Context,
    policy: Annotated[
        Path,
        typer.Option(
            parser=model_path, metavar="MODEL", help="Of version 0: directory or Hub name."
        ),
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
    named: Annotated[
        str | None,
        typer.Option("--agent", help="codex, claude-code …, agent.py, or 'CMD {prompt}'."),
    ] = None,
    tasks: Annotated[str | None, typer.Option(help=TASKS_HELP)] = None,
    verify: Annotated[
        str, typer.Option("--verifier", help="task, number, exact, regex, or FILE.py:NAME.")
    ] = "task",
    split: Annotated[str | None, typer.Option(help="Only tasks of this split.")] = None,
    sandbox: SandboxOption = None,
    fleet: FleetOption = "local",
    sampling: SamplingOption = "policy",
    parallel: Annotated[int, typer.Option(min=1, help="Sessions at a time.")] = 16,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Longest time of one session, in seconds.")
    ] = 600.0,
    directory: Annotated[
        Path | None, typer.Option(help="Workspaces and logs, on each machine; else OUT/sessions.")
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
    recorded_policy: Annotated[
        str | None,
        typer.Option(
            help="--from-store: of several recorded policies, the name of the one to train."
        ),
    ] = None,
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
    seed: Annotated[int, typer.Option(min=0, help="Order of tasks and minibatches.")] = 0,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    recompute: RecomputeOption = False,
    lora_rank: LoraRankOption = 0,
    publish_through: PublishThroughOption = "directory",
    transfer_address: Annotated[
        str, typer.Option(help="This machine's address for the engines: loopback or private.")
    ] = "127.0.0.1",
    transfer_backend: TransferBackendOption = "gloo",
    evaluate_every: Annotated[
        int, typer.Option(min=0, help="Steps between measurements on held-out tasks; 0: none.")
    ] = 0,
    evaluation_tasks: Annotated[
        str | None, typer.Option(help="The held-out tasks; default: --tasks, of another split.")
    ] = None,
    evaluation_split: Annotated[
        str | None, typer.Option(help="Only held-out tasks of this split.")
    ] = None,
    settings_file: SettingsOption = None,
    json: JsonOption = False,
) -> None:
    """Train with proxy and engine as services, or on recorded sessions.

    The same command resumes. --from-store needs no engine; with one, each version is published.
    """
    with needs_extra("train", "training needs the training extra"):
        from bridle.run.training import TrainingPlan, newest_policy, resumable, step_line, train
    from bridle.harnesses.given import GIVEN_FILE, GivenRewards
    from bridle.harnesses.rollout import RolloutSettings
    from bridle.harnesses.sampling import session_settings
    from bridle.reconstruct.rewards import RewardNotice
    from bridle.run.agents import shuffled_tasks
    from bridle.run.attempts import attempt
    from bridle.run.config import EvaluationConfig, TasksConfig
    from bridle.run.evaluation import HeldOut
    from bridle.run.fleets import fleet_of
    from bridle.run.groups import FinishedGroups, planned
    from bridle.run.local import evaluation_run, held_out_tasks, runs_of
    from bridle.run.recorded import Recordings, train_recorded
    from bridle.run.report import account_report
    from bridle.run.rollouts import Rollouts
    from bridle.run.stack import MODEL, Stack, kind_of
    from bridle.trainer.config import GrpoConfig
    from bridle.trainer.credit.rewards import aggregation
    from bridle.trainer.report import StepReport

    def on_rule(line: str) -> None:
        err.print(line, highlight=False, soft_wrap=True)

    leave_on_sigterm()
    config = chosen(context, GrpoConfig, GRPO, settings_file)
    admin_key, engine_key = admin_key_for(proxy), key_in(API_KEY_VARIABLE)
    plan_name = output.name if from_store else run or "train"
    plan = TrainingPlan(
        policy=policy,
        directory=output,
        store=store,
        run_id=f"train:{plan_name}",
        config=config,
        groups_per_step=groups,
        name=recorded_policy or DEFAULT_POLICY,
    )

    def on_step(report: StepReport) -> None:
        if json:
            print_json(report.metrics() | {"step": report.step, "version": report.version})
            return
        out.print(step_line(report), highlight=False, soft_wrap=True)

    def services(urls: list[str]) -> Stack:
        with resumable():
            return Stack(
                urls[0],
                proxy,
                more_engines=tuple(urls[1:]),
                kind=kind_of(urls[0], engine_key),
                engine_key=engine_key,
                admin_key=admin_key,
            )

    evaluation = EvaluationConfig(
        evaluate_every, evaluation_tasks or None, evaluation_split or None
    )
    if from_store:
        if evaluate_every:
            fail("--evaluate-every runs an agent, and --from-store has none", 2)
        context.with_resource(hold(output, output / LOCK))
        with reader(store) as source:
            require_run(source, run)
        recordings = Recordings(run, where, version, group_size if wait else None, other_policy)
        with attempt(plan.store, *runs_of(plan.run_id, plan_name)):
            stack = services(engine) if engine else None
            loop = train_recorded(plan, recordings, stack=stack, on_step=on_step, on_rule=on_rule)
    else:
        _refuse(
            where=where,
            wait=wait,
            version=version,
            other_policy=other_policy,
            recorded_policy=recorded_policy,
        )
        if not (engine and named and tasks):
            fail("name --engine, --agent and --tasks, or --from-store", 2)
        held_out = held_out_tasks(evaluation, TasksConfig(tasks, verify, split))
        pool = shuffled_tasks(tasks, split, config.seed)
        adapter, running = fleet_of(fleet, named, verify, pool, sandbox)
        running.require_launchable(adapter, pool[0], output, MODEL)
        context.with_resource(hold(output, output / LOCK))
        with reader(store) as source:
            finished = FinishedGroups.of(source, plan.run_id)
        settings = RolloutSettings(
            directory=directory or output / "sessions",
            parallel=parallel,
            timeout_s=timeout,
            model=MODEL,
            run_id=plan.run_id,
            session_settings=session_settings(sampling),
            hidden=(*private_in(output), *store_files(store)),
        )
        given = GivenRewards(output / GIVEN_FILE)
        with (
            attempt(plan.store, *runs_of(plan.run_id, plan_name, held_out)),
            Rollouts(proxy, running, key=admin_key, given=given) as rollouts,
        ):
            live = services(engine)
            planning = planned(plan.run_id, pool, group_size, finished)
            rule, notice = aggregation(config.advantages), RewardNotice(on_rule)
            started = rollouts.groups(
                adapter, planning, settings, lambda result: notice(rule, result.rewards)
            )
            measured = None
            if held_out:
                own = evaluation_run(store, plan.run_id, rule)
                measured = HeldOut(
                    rollouts, adapter, held_out, settings, own, evaluate_every, evaluation.samples
                )
            loop = train(
                plan, live, started, on_step=on_step, held_out=measured, given=rollouts.given
            )
    if not json:
        out.print(
            f"{newest_policy(plan)}: after {loop.step} of {loop.config.steps} steps",
            highlight=False,
            soft_wrap=True,
        )
        with reader(store) as source:
            for line in account_report(source, plan.run_id):
                out.print(line, highlight=False, soft_wrap=True)


def _refuse(**options: object) -> None:
    """End the command if an option was given that is for recorded sessions only."""
    for name, value in options.items():
        if value:
            fail(f"--{name.replace('_', '-')} is for --from-store", 2)
