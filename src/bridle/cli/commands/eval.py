"""``bridle eval``: measure agents on tasks, in new sessions or in recorded ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.progress import Progress
from rich.table import Table

from bridle.cli.options import JsonOption, ProxyOption, StoreOption
from bridle.cli.reading import reader, require_run
from bridle.cli.serving import leave_on_sigterm
from bridle.cli.settings import configured
from bridle.cli.terminal import err, fail, out, plain_table, print_json
from bridle.extras import needs_extra
from bridle.reconstruct.evaluation import Attempt, Evaluation, attempts_of, evaluated, split_by
from bridle.reconstruct.rewards import RewardNotice
from bridle.run.config import EvalConfig, permitted
from bridle.run.environment import EngineKind
from bridle.run.hub import model_directory


@configured(
    EvalConfig,
    {
        "--tasks": "tasks.source",
        "--verifier": "tasks.verifier",
        "--policy": "model",
        "--samples": "samples",
    },
)
def eval(
    context: typer.Context,
    proxy: ProxyOption,
    store: StoreOption,
    config: EvalConfig,
    agents: Annotated[
        list[str] | None,
        typer.Option("--agent", help="codex, agent.py, or 'CMD {prompt}'. Repeatable."),
    ] = None,
    output: Annotated[
        Path, typer.Option("--out", help="Workspaces, report.json, plot; store of --policy.")
    ] = Path("runs/eval"),
    run: Annotated[
        str | None, typer.Option(help="Without --agent: only this run's sessions.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure agents on tasks or recorded sessions (pass@k, mean@k).

    Without --agent the sessions are those that the store holds.
    """
    named = agents or ([config.agent.name] if config.agent.name else [])
    agent, samples, by = config.agent, config.samples, config.by
    leave_on_sigterm()
    if named:
        if not config.tasks.source:
            fail("name --tasks, or no --agent to read what is recorded", 2)
        from bridle.run.agents import first_tasks
        from bridle.run.evaluation import evaluate

        permissions = permitted(agent, config.tasks)
        permissions.grant()
        chosen = first_tasks(config.tasks.source, config.tasks.split, config.limit)
        url, key = proxy, None
        if config.model is not None:
            url, key = _serve(context, model_directory(config.model), config.engine, output)
        attempts: list[Attempt] = []
        with Progress(console=err) as progress:
            for name in named:
                bar = progress.add_task(name, total=len(chosen) * samples)
                attempts += evaluate(
                    name,
                    chosen,
                    config.tasks.verifier,
                    samples=samples,
                    proxy=url,
                    key=key,
                    directory=agent.directory or output / "sessions",
                    sandbox=agent.sandbox,
                    permissions=permissions,
                    fleet=agent.fleet,
                    sampling=agent.sampling,
                    parallel=agent.parallel,
                    timeout_s=agent.timeout_s,
                    guards=agent.guards,
                    bounds=agent.bounds,
                    options={**config.tasks.options, **agent.options},
                    on_result=lambda _result, bar=bar: progress.advance(bar),
                    on_rule=err.print,
                )
    else:
        notice = RewardNotice(err.print)
        sources = None if config.sources is None else [one.value for one in config.sources]
        with reader(store) as opened:
            require_run(opened, run)
            attempts = attempts_of(
                opened, run=run, where=config.where, sources=sources, notice=notice
            )
    if not attempts:
        fail("no session with a verdict: is there a reward, and does `sources` name who gave it?")
    ks = tuple(sorted(set(config.k or (1, samples))))
    whole = evaluated(attempts, ks, config.success)
    parts = {
        name: evaluated(own, ks, config.success) for name, own in split_by(attempts, by).items()
    }
    report = {"all": whole.as_data(), by: {name: one.as_data() for name, one in parts.items()}}
    if named or config.plot:
        output.mkdir(parents=True, exist_ok=True)
        (output / "report.json").write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    if config.plot:
        with needs_extra("train", "the plot needs matplotlib"):
            from bridle.run.report import plot_evaluations
        plot_evaluations(parts, output / "eval.png")
    if json:
        print_json(report)
        return
    out.print(table(parts, whole, by))
    if named or config.plot:
        drawn = f"   plot: {output / 'eval.png'}" if config.plot else ""
        out.print(f"report: {output / 'report.json'}{drawn}")


def _serve(
    context: typer.Context, policy: Path, engine: EngineKind, output: Path
) -> tuple[str, str | None]:
    """Start an engine and a proxy that run as long as the command.

    Return the proxy's URL and its key.
    """
    with needs_extra("train", "serving a policy needs the training extra"):
        from bridle.run.stack import stack
    from bridle.store.schema.database import migrate

    output.mkdir(parents=True, exist_ok=True)
    recorded = str(output / "bridle.db")
    migrate(recorded)
    running = context.with_resource(stack(policy, recorded, output / "logs", engine=engine))
    return running.proxy_url, running.admin_key


def table(parts: Mapping[str, Evaluation], whole: Evaluation, by: str) -> Table:
    """Return the figures as a table for a person, with a row for each part.

    If there are several parts, there is also a row for all of them.
    """
    ks = sorted(whole.pass_at)
    passed = [f"pass@{k}" for k in ks]
    shown = plain_table(by, "tasks", "sessions", *passed, f"mean@{whole.mean_at[0]}")
    rows = {**parts, "all": whole} if len(parts) > 1 else parts
    for name, one in rows.items():
        passes = [str(one.pass_at[k]) if k in one.pass_at else "–" for k in ks]
        shown.add_row(name, str(one.tasks), str(one.attempts), *passes, str(one.mean_at[1]))
    return shown
