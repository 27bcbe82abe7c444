"""``bridle rollout``: run a harness on tasks, verified and recorded."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.progress import Progress

from bridle.cli.options import (
    TASKS_HELP,
    FleetOption,
    JsonOption,
    ProxyOption,
    SamplingOption,
    SandboxOption,
    SetOption,
)
from bridle.cli.serving import leave_on_sigterm
from bridle.cli.settings import part_options
from bridle.cli.terminal import err, fail, out, print_json
from bridle.harnesses.client import Client, ControlError, ProxyUnreachable
from bridle.harnesses.episode import Outcome
from bridle.harnesses.guards import GuardAction
from bridle.harnesses.rollout import RolloutResult, RolloutSettings, grouped
from bridle.harnesses.sampling import POLICY, session_settings
from bridle.harnesses.stages import Throughput
from bridle.reconstruct.rewards import Aggregation, RewardNotice, findings_in
from bridle.run.agents import first_tasks
from bridle.run.environment import admin_key_for
from bridle.run.fleets import fleet_of
from bridle.run.rollouts import NO_CALL_HINT, Rollouts

_RULE: Final = Aggregation()
"""The rule that makes a session's scores one number; a training run may state another one."""


def rollout(
    named: Annotated[
        str,
        typer.Option("--agent", help="codex, claude-code …, agent.py, or 'CMD {prompt}'."),
    ],
    tasks: Annotated[str, typer.Option(help=TASKS_HELP)],
    proxy: ProxyOption,
    verify: Annotated[
        str, typer.Option("--verifier", help="task, number, exact, regex, or FILE.py:NAME.")
    ] = "task",
    split: Annotated[str | None, typer.Option(help="Only tasks of this split.")] = None,
    sandbox: SandboxOption = None,
    fleet: FleetOption = "local",
    sampling: SamplingOption = POLICY,
    limit: Annotated[int | None, typer.Option(min=1, help="Largest number of tasks.")] = None,
    group_size: Annotated[int, typer.Option(min=1, help="Sessions per task.")] = 1,
    parallel: Annotated[int, typer.Option(min=1, help="Sessions at a time.")] = 4,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Longest time of one session, in seconds.")
    ] = 600.0,
    model: Annotated[str, typer.Option(help="Model name that the harness asks for.")] = "policy",
    directory: Annotated[Path, typer.Option(help="Workspaces and logs.")] = Path("runs/rollout"),
    guards: Annotated[
        GuardAction, typer.Option(help="What a guard's finding costs: docs/tasks.md.")
    ] = "warn",
    key: Annotated[
        str | None, typer.Option(envvar="BRIDLE_ADMIN_KEY", help="Admin key of the proxy.")
    ] = None,
    json: JsonOption = False,
    assignments: SetOption = None,
) -> None:
    """Run an agent on tasks through a running proxy; each session is verified and rewarded."""
    key = admin_key_for(proxy, key)
    chosen = first_tasks(tasks, split, limit)
    adapter, running = fleet_of(
        fleet, named, verify, chosen, sandbox, options=part_options(assignments or ())
    )
    leave_on_sigterm()
    with (
        Rollouts(proxy, running, key=key) as rollouts,
        rollouts.run(adapter.name) as run_id,
        Progress(console=err) as progress,
    ):
        settings = RolloutSettings(
            directory,
            parallel,
            timeout,
            model,
            run_id,
            session_settings=session_settings(sampling),
            guards=guards,
        )
        bar = progress.add_task(adapter.name, total=len(chosen) * group_size)
        notice = RewardNotice(lambda line: err.print(line, highlight=False, soft_wrap=True))

        def on_result(result: RolloutResult) -> None:
            notice(_RULE, result.rewards)
            progress.advance(bar)

        began = time.monotonic()
        try:
            results = rollouts.collect(adapter, grouped(chosen, group_size), settings, on_result)
        except KeyboardInterrupt:
            err.print(
                f"\nStopped. What has ended is recorded: bridle sessions --run {run_id}",
                highlight=False,
                soft_wrap=True,
            )
            raise
    took = time.monotonic() - began
    fast = Throughput.of([result.stages for result in results if result.stages], took, parallel)
    err.print(str(fast), highlight=False, soft_wrap=True)
    if json:
        print_json([_as_data(result) for result in results])
    else:
        _print(results)
    ran = [
        r.session_id for r in results if r.session_id and r.outcome is not Outcome.INFRASTRUCTURE
    ]
    if ran and (hint := asyncio.run(_hint_at_calls(proxy, key, ran))):
        err.print(hint, highlight=False, soft_wrap=True)
    err.print(f"bridle doctor {run_id} explains the result", highlight=False, soft_wrap=True)
    reasons = Counter(_reason(result, timeout) for result in results if not _completed(result))
    for reason, count in reasons.most_common():
        err.print(f"{count} {reason}", highlight=False, soft_wrap=True)
    if not any(map(_completed, results)):
        fail("no session completed")


async def _hint_at_calls(proxy: str, key: str | None, sessions: Sequence[str]) -> str:
    """Return a hint if none of ``sessions`` has a call or they cannot be counted, else an empty
    text. Stop at the first session that has a call."""
    async with Client(proxy, key) as client:
        try:
            for session in sessions:
                if (await client.session(session))["calls"]:
                    return ""
        except (ProxyUnreachable, ControlError) as error:
            return f"the sessions' calls cannot be counted: {error}"
    return f"no session has a call ({NO_CALL_HINT})"


def _print(results: Sequence[RolloutResult]) -> None:
    outcomes = Counter(str(result.outcome) for result in results)
    numbers = [_RULE.value(result.rewards) for result in results]
    rewards = [value for value in numbers if value is not None]
    out.print(", ".join(f"{count} {name}" for name, count in outcomes.most_common()))
    if rewards:
        out.print(f"mean reward {sum(rewards) / len(rewards):.3f}")
    found = Counter(
        f"{one.name} ({one.mode})" for result in results for one in findings_in(result.rewards)
    )
    if found:
        each = ", ".join(f"{name} in {count}" for name, count in found.most_common())
        out.print(f"findings of guards, by sessions: {each}", highlight=False, soft_wrap=True)


def _completed(result: RolloutResult) -> bool:
    return result.outcome is Outcome.COMPLETED


def _reason(result: RolloutResult, timeout_s: float) -> str:
    """Return the reason why a session did not complete."""
    if result.outcome is Outcome.TIMEOUT:
        why = f"the agent ran for more than {timeout_s:g} s"
    elif result.outcome is Outcome.AGENT_ERROR:
        why = f"the agent exited with {result.exit_code}"
    else:
        why = result.error
    return f"{result.outcome}: {why}"


def _as_data(result: RolloutResult) -> dict[str, object]:
    return {
        "session_id": result.session_id,
        "task_id": result.task_id,
        "group_id": result.group_id,
        "outcome": result.outcome,
        "reward": _RULE.value(result.rewards),
        "scores": dict(result.scores),
        "findings": {
            one.name: {"mode": one.mode, **one.detail} for one in findings_in(result.rewards)
        },
        "seconds": result.seconds,
        "stages": dict(result.stages),
        "exit_code": result.exit_code,
        "answer": result.answer,
        "error": result.error,
    }
