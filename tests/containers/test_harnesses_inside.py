"""The installed harnesses, unmodified, each in a container of a task's image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bridle.bench.re_entry import Draw, bench_re_entry
from bridle.bench.re_entry_results import Report
from bridle.bench.seeded_policy import Kind
from bridle.bench.shell_policy import ShellPolicy, WorkedThrough
from bridle.engine.scripted import ScriptedCall, ScriptedReply, ScriptedRequest
from bridle.harnesses.adapters import ADAPTERS
from bridle.harnesses.adapters.mini_swe_agent import MiniSweAgent
from bridle.harnesses.client import Client
from bridle.harnesses.episode import Outcome
from bridle.harnesses.fleet import LocalFleet
from bridle.harnesses.rollout import Job, Rollout, RolloutSettings
from bridle.harnesses.sandboxes import ContainerProvider, Launch, NotLaunchable, SandboxRequest
from bridle.harnesses.tasks.task import Task
from bridle.harnesses.verifiers import FunctionVerifier, RegexAnswer
from bridle.reconstruct.audit import audit_session

pytestmark = pytest.mark.containers

POLICY = ShellPolicy(turns=2)


def _slow(request: ScriptedRequest) -> ScriptedReply:
    """Asks the agent to sleep when its task says so, else to end."""
    asked = str(request.messages)
    submit = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo done"
    command = "sleep 60" if "SLOWLY" in asked else submit
    return ScriptedReply(tool_calls=(ScriptedCall("bash", {"command": command}),))


@pytest.mark.parametrize("name", ["mini-swe-agent", "claude-code", "codex"])
@pytest.mark.sampled(2)
async def test_a_harness_works_in_a_container_and_is_recorded_whole(
    stage: Any, tmp_path: Path, name: str
) -> None:
    bench = stage(POLICY)
    sandboxes = ContainerProvider(name)
    settings = RolloutSettings(tmp_path / "sessions", timeout_s=120, retries=0)

    async with Client(bench.url) as client:
        rollout = Rollout(
            client,
            ADAPTERS.get(name)(),
            LocalFleet(sandboxes, FunctionVerifier(WorkedThrough())),
            settings,
        )
        (result,) = await rollout.collect([Job(POLICY.task(name))])
        actions = await client.actions(str(result.session_id))
    await sandboxes.close()

    assert (result.outcome, result.scores) == (Outcome.COMPLETED, {"reward": 1.0}), result
    assert len(actions) >= 4, "two commands a turn, as the guards read them"
    audited = audit_session(bench.reader, str(result.session_id), bodies=True)
    assert audited.clean
    assert audited.samples == 1


async def test_a_session_in_a_container_is_re_entered() -> None:
    report = Report()
    await bench_re_entry(["codex"], ["container"], [Kind.WORK], Draw(1, 5, 6), report)
    assert report.failures() == []
    (cell,) = report.measured
    assert (cell.entered, cell.equal) == (1, 1)


async def test_sessions_forked_in_one_container_are_users_of_their_own(
    stage: Any, tmp_path: Path
) -> None:
    bench = stage(POLICY)
    adapter = MiniSweAgent()
    sandboxes = adapter.warm_containers()
    settings = RolloutSettings(tmp_path / "sessions", parallel=3, timeout_s=120, retries=0)

    async with Client(bench.url) as client:
        rollout = Rollout(
            client, adapter, LocalFleet(sandboxes, FunctionVerifier(WorkedThrough())), settings
        )
        results = await rollout.collect([Job(POLICY.task(str(n))) for n in range(6)])
        request = SandboxRequest(tmp_path / "one")
        async with sandboxes.open(request) as one, sandboxes.open(request) as other:
            environment = one.place.environment
            spying = f"id -u; ls {other.place.home.parent} && echo seen; kill -9 -1; true"
            finished = await one.exec(Launch(("sh", "-c", spying), environment, 20, "verifier"))
            hanging = Launch(("sleep", "99"), environment, 1, "verifier")
            assert (await one.exec(hanging)).timed_out
            alive = await other.exec(Launch(("echo", "alive"), environment, 20, "verifier"))
            with pytest.raises(NotLaunchable, match="Python harnesses"):
                await one.exec(Launch(("sh", "-c", "true"), environment, 20))
    await sandboxes.close()

    assert {(r.outcome, r.scores["reward"]) for r in results} == {(Outcome.COMPLETED, 1.0)}
    assert finished.exit_code == 137
    assert "seen" not in finished.stdout.tail
    assert alive.stdout.tail == "alive\n"


async def test_a_forked_session_out_of_time_is_ended_and_its_neighbours_go_on(
    stage: Any, tmp_path: Path
) -> None:
    bench = stage(_slow)
    adapter = MiniSweAgent()
    sandboxes = adapter.warm_containers()
    settings = RolloutSettings(tmp_path / "sessions", timeout_s=25, retries=0)
    tasks = [Task("slow", "Work SLOWLY."), Task("quick", "Work.")]

    async with Client(bench.url) as client:
        rollout = Rollout(client, adapter, LocalFleet(sandboxes, RegexAnswer(".")), settings)
        results = await rollout.collect([Job(task) for task in tasks])
    await sandboxes.close()

    outcomes = {result.task_id: result.outcome for result in results}
    assert outcomes == {"slow": Outcome.TIMEOUT, "quick": Outcome.COMPLETED}
