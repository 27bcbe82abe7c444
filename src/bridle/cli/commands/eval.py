"""``bridle eval``: measure agents on tasks, in new sessions or in recorded ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import orjson
import typer
from rich.progress import Progress
from rich.table import Table

from bridle.cli.options import (
    TASKS_HELP,
    EngineOption,
    FleetOption,
    JsonOption,
    ProxyOption,
    SamplingOption,
    SandboxOption,
    StoreOption,
    model_path,
)
from bridle.cli.reading import reader, require_run
from bridle.cli.serving import leave_on_sigterm
from bridle.cli.terminal import err, fail, out, print_json
from bridle.extras import needs_extra
from bridle.harnesses.sampling import POLICY
from bridle.reconstruct.evaluation import Attempt, Evaluation, attempts_of, evaluated, split_by
from bridle.reconstruct.rewards import RewardNotice
from bridle.run.environment import EngineKind
from bridle.store.reward import RewardSource


def eval(
    context: typer.Context,
    proxy: ProxyOption,
    store: StoreOption,
    named: Annotated[
        list[str] | None,
        typer.Option("--agent", help="codex, agent.py, or 'CMD {prompt}'. Repeatable."),
    ] = None,
    tasks: Annotated[str | None, typer.Option(help=TASKS_HELP)] = None,
    policy: Annotated[
        Path | None,
        typer.Option(
            parser=model_path,
            metavar="MODEL",
            help="Serve this policy for it; default: what --proxy serves.",
        ),
    ] = None,
    engine: EngineOption = "embedded",
    verify: Annotated[
        str, typer.Option("--verifier", help="task, number, exact, regex, or FILE.py:NAME.")
    ] = "task",
    split: Annotated[str | None, typer.Option(help="Only tasks of this split.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Largest number of tasks.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Sessions per task.")] = 1,
    k: Annotated[
        list[int] | None, typer.Option("--k", min=1, help="A k of pass@k. Repeatable.")
    ] = None,
    success: Annotated[float, typer.Option(help="Reward from which a session has passed.")] = 1.0,
    by: Annotated[
        Literal["harness", "task", "version"], typer.Option(help="What the table has a row for.")
    ] = "harness",
    sandbox: SandboxOption = None,
    fleet: FleetOption = "local",
    sampling: SamplingOption = POLICY,
    parallel: Annotated[int, typer.Option(min=1, help="Sessions at a time.")] = 4,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Longest time of one session, in seconds.")
    ] = 600.0,
    output: Annotated[
        Path, typer.Option("--out", help="Workspaces, report.json, plot; store of --policy.")
    ] = Path("runs/eval"),
    run: Annotated[
        str | None, typer.Option(help="Without --agent: only this run's sessions.")
    ] = None,
    where: Annotated[
        str | None, typer.Option(help="Without --agent: SQL on the columns of sessions.")
    ] = None,
    source: Annotated[
        list[RewardSource] | None,
        typer.Option(help="Without --agent: whose rewards count; default: as the run states."),
    ] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw pass@k into OUT/eval.png.")] = False,
    json: JsonOption = False,
) -> None:
    """Measure agents on tasks (pass@k, mean@k); without --agent, from recorded sessions."""
    leave_on_sigterm()
    if named:
        if tasks is None:
            fail("name --tasks, or no --agent to read what is recorded", 2)
        from bridle.run.agents import first_tasks
        from bridle.run.evaluation import evaluate

        chosen = first_tasks(tasks, split, limit)
        url, key = proxy, None
        if policy is not None:
            url, key = _serve(context, policy, engine, output)
        attempts: list[Attempt] = []
        with Progress(console=err) as progress:
            for agent in named:
                bar = progress.add_task(agent, total=len(chosen) * samples)
                attempts += evaluate(
                    agent,
                    chosen,
                    verify,
                    samples=samples,
                    proxy=url,
                    key=key,
                    directory=output / "sessions",
                    sandbox=sandbox,
                    fleet=fleet,
                    sampling=sampling,
                    parallel=parallel,
                    timeout_s=timeout,
                    on_result=lambda _result, bar=bar: progress.advance(bar),
                    on_rule=lambda line: err.print(line, highlight=False, soft_wrap=True),
                )
    else:
        notice = RewardNotice(lambda line: err.print(line, highlight=False, soft_wrap=True))
        sources = None if source is None else [one.value for one in source]
        with reader(store) as opened:
            require_run(opened, run)
            attempts = attempts_of(opened, run=run, where=where, sources=sources, notice=notice)
    if not attempts:
        fail("no session with a verdict: is there a reward, and does --source name who gave it?")
    ks = tuple(sorted(set(k or (1, samples))))
    whole = evaluated(attempts, ks, success)
    parts = {name: evaluated(own, ks, success) for name, own in split_by(attempts, by).items()}
    report = {"all": whole.as_data(), by: {name: one.as_data() for name, one in parts.items()}}
    if named or plot:
        output.mkdir(parents=True, exist_ok=True)
        (output / "report.json").write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    if plot:
        with needs_extra("train", "the plot needs matplotlib"):
            from bridle.run.report import plot_evaluations
        plot_evaluations(parts, output / "eval.png")
    if json:
        print_json(report)
        return
    out.print(table(parts, whole, by))
    if named or plot:
        drawn = f"   plot: {output / 'eval.png'}" if plot else ""
        out.print(f"report: {output / 'report.json'}{drawn}", highlight=False, soft_wrap=True)


def _serve(
    context: typer.Context, policy: Path, engine: EngineKind, output: Path
) -> tuple[str, str | None]:
    """Start an engine and a proxy that run as long as the command. Return the proxy's URL and its
    key."""
    with needs_extra("train", "serving a policy needs the training extra"):
        from bridle.run.stack import stack
    from bridle.store.schema.database import migrate

    output.mkdir(parents=True, exist_ok=True)
    recorded = str(output / "bridle.db")
    migrate(recorded)
    running = context.with_resource(stack(policy, recorded, output / "logs", engine=engine))
    return running.proxy_url, running.admin_key


def table(parts: Mapping[str, Evaluation], whole: Evaluation, by: str) -> Table:
    """Return the figures as a table for a person, with a row for each part, and one for all if
    there are several parts."""
    shown = Table(box=None, pad_edge=False)
    shown.add_column(by)
    shown.add_column("tasks", justify="right")
    shown.add_column("sessions", justify="right")
    ks = sorted(whole.pass_at)
    for k in ks:
        shown.add_column(f"pass@{k}", justify="right")
    shown.add_column(f"mean@{whole.mean_at[0]}", justify="right")
    rows = {**parts, "all": whole} if len(parts) > 1 else parts
    for name, one in rows.items():
        passes = [str(one.pass_at[k]) if k in one.pass_at else "–" for k in ks]
        shown.add_row(name, str(one.tasks), str(one.attempts), *passes, str(one.mean_at[1]))
    return shown
