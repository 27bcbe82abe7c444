"""``bridle rollout``: run a harness on tasks, verified and recorded."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from rich.progress import Progress

from bridle.cli.options import JsonOption, KeyOption, ProxyOption
from bridle.cli.serving import leave_on_sigterm
from bridle.cli.settings import configured
from bridle.cli.terminal import err, fail, out, print_json
from bridle.harnesses.client import Client, ControlError, ProxyUnreachable
from bridle.harnesses.episode import Outcome
from bridle.harnesses.rollout import RolloutResult, grouped
from bridle.harnesses.stages import Throughput
from bridle.reconstruct.rewards import Aggregation, RewardNotice, findings_in
from bridle.run.agents import first_tasks
from bridle.run.config import RolloutConfig, permitted, reentrant
from bridle.run.environment import admin_key_for
from bridle.run.rollouts import (
    NO_CALL_HINT,
    Rollouts,
    configured_fleet,
    configured_settings,
)

_RULE: Final = Aggregation()
"""The rule that makes a session's scores one number; a training run may state another one."""


@configured(
    RolloutConfig,
    {
        "--agent": "agent.name",
        "--unsafe-sandbox": "agent.unsafe_sandbox",
        "--tasks": "tasks.source",
        "--verifier": "tasks.verifier",
        "--limit": "limit",
        "--group-size": "group_size",
        "--parallel": "agent.parallel",
    },
)
def rollout(
    proxy: ProxyOption,
    config: RolloutConfig,
    key: KeyOption = None,
    json: JsonOption = False,
) -> None:
    """Run an agent on tasks; each session is verified and rewarded.

    The sessions go through a running proxy.
    """
    agent = config.agent
    if not (agent.name and config.tasks.source):
        fail("name --agent and --tasks", 2)
    key = admin_key_for(proxy, key)
    permitted(agent, config.tasks).grant()
    chosen = first_tasks(config.tasks.source, config.tasks.split, config.limit)
    adapter, running = configured_fleet(agent, config.tasks, chosen)
    folder = Path(agent.directory or "runs/rollout")
    settings = configured_settings(agent, config.scorers, folder, model=config.model)
    leave_on_sigterm()
    with (
        Rollouts(proxy, running, key=key) as rollouts,
        rollouts.run(adapter.name, config=reentrant(config)) as run_id,
        Progress(console=err) as progress,
    ):
        settings = replace(settings, run_id=run_id)
        bar = progress.add_task(adapter.name, total=len(chosen) * config.group_size)
        notice = RewardNotice(err.print)

        def on_result(result: RolloutResult) -> None:
            notice(_RULE, result.rewards)
            progress.advance(bar)

        began = time.monotonic()
        try:
            results = rollouts.collect(
                adapter, grouped(chosen, config.group_size), settings, on_result
            )
        except KeyboardInterrupt:
            err.print(f"\nStopped. What has ended is recorded: bridle sessions --run {run_id}")
            raise
    took = time.monotonic() - began
    fast = Throughput.of(
        [result.stages for result in results if result.stages], took, agent.parallel
    )
    err.print(str(fast))
    if line := rollouts.judgements_line():
        err.print(line)
    if json:
        print_json([_as_data(result) for result in results])
    else:
        _print(results)
    ran = [
        r.session_id for r in results if r.session_id and r.outcome is not Outcome.INFRASTRUCTURE
    ]
    if ran and (hint := asyncio.run(_hint_at_calls(proxy, key, ran))):
        err.print(hint)
    err.print(f"bridle doctor {run_id} explains the result")
    reasons = Counter(
        _reason(result, agent.timeout_s) for result in results if not _completed(result)
    )
    for reason, count in reasons.most_common():
        err.print(f"{count} {reason}")
    if not any(map(_completed, results)):
        fail("no session completed")


async def _hint_at_calls(proxy: str, key: str | None, sessions: Sequence[str]) -> str:
    """Return a hint if none of ``sessions`` has a call, else an empty text.

    The hint is also returned if the calls cannot be counted. Stop at the first session that has a
    call.
    """
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
        out.print(f"findings of guards, by sessions: {each}")


def _completed(result: RolloutResult) -> bool:
    return result.outcome is Outcome.COMPLETED


def _reason(result: RolloutResult, timeout_s: float) -> str:
    """Return the reason why a session did not complete."""
    if result.outcome is Outcome.TIMEOUT:
        why = f"the agent ran for more than {timeout_s:g} s"
    elif result.outcome is Outcome.AGENT_ERROR:
        why = result.error or f"the agent exited with {result.exit_code}"
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
