"""The rollout runner: what is recorded of each way a session can end."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bridle.harnesses.adapters import Command
from bridle.harnesses.adapters.python_agent import PythonAgent
from bridle.harnesses.client import Client, ControlError
from bridle.harnesses.episode import Outcome
from bridle.harnesses.fleet import LocalFleet, local
from bridle.harnesses.rollout import Job, Rollout, RolloutResult, RolloutSettings, grouped
from bridle.harnesses.sandboxes import (
    ForkedProvider,
    NotLaunchable,
    ProcessProvider,
    ProcessSandbox,
    SandboxLost,
    SandboxProvider,
    SandboxRequest,
)
from bridle.harnesses.sandboxes.bounds import Bounds
from bridle.harnesses.sandboxes.leftovers import remove_folder
from bridle.harnesses.tasks.task import Task
from bridle.harnesses.verifiers import (
    CommandVerifier,
    Delivery,
    ExactAnswer,
    FunctionVerifier,
    VerifierError,
)

TextOf = Callable[[Path], Awaitable[str]]
AssertGone = Callable[[int | Path], Awaitable[None]]
ROOT = Path(__file__).parents[2]
TASK = Task("t", "the prompt", payload={"answer": "yes"}, files={"given.txt": "from the task"})


@dataclass
class Runner:
    """Runs jobs with a shell command as the harness."""

    stand_in: Any
    directory: Path

    async def __call__(
        self,
        command: str,
        jobs: Sequence[Job] = (Job(TASK, "grp_1"),),
        *,
        sandbox: Any = None,
        verifier: Any = None,
        progress: Any = None,
        **settings: Any,
    ) -> list[RolloutResult]:
        async with Client(self.stand_in.url) as client:
            rollout = Rollout(
                client,
                Command(("sh", "-c", command), name="shell"),
                LocalFleet(sandbox or ProcessProvider(), verifier or ExactAnswer()),
                RolloutSettings(self.directory, retry_wait_s=0.01, **{"timeout_s": 20, **settings}),
            )
            return await rollout.collect(jobs, progress)


@pytest.fixture
def run(stand_in: Any, tmp_path: Path) -> Runner:
    return Runner(stand_in, tmp_path / "sessions")


async def test_a_completed_session_is_scored_rewarded_and_sealed(
    run: Runner, stand_in: Any
) -> None:
    (result,) = await run("echo thinking; echo Yes", run_id="run_1", labels={"stage": "eval"})

    assert (result.outcome, result.scores, result.exit_code) == (
        Outcome.COMPLETED,
        {"reward": 1.0},
        0,
    )
    assert (result.task_id, result.group_id, result.answer) == ("t", "grp_1", "Yes")
    assert result.seconds > 0
    session = stand_in.sessions[result.session_id]
    assert (session["group_id"], session["harness"], session["run_id"]) == (
        "grp_1",
        "shell",
        "run_1",
    )
    assert session["labels"] == {"stage": "eval"}
    assert [(r["name"], r["value"]) for r in stand_in.rewards] == [("reward", 1.0)]
    assert stand_in.sealed == {result.session_id: "completed"}
    assert not list(run.directory.iterdir()), "directories of completed sessions are removed"


async def test_a_session_is_sealed_with_how_its_harness_was_started(
    run: Runner, stand_in: Any
) -> None:
    (result,) = await run("echo $OPENAI_API_KEY Yes")
    start = stand_in.started[result.session_id]
    assert start["argv"] == ["sh", "-c", "echo $OPENAI_API_KEY Yes"]
    assert (start["folder"], start["home"]) != (None, None)
    assert "OPENAI_API_KEY" in start["environment_names"]


async def test_an_agent_that_fails_gave_no_answer(run: Runner, stand_in: Any) -> None:
    (result,) = await run("echo yes; exit 3")

    assert (result.outcome, result.exit_code, result.answer) == (Outcome.AGENT_ERROR, 3, "")
    assert result.scores == {"reward": 0.0}
    assert stand_in.sealed == {result.session_id: "agent_error"}
    assert (run.directory / result.session_id / "outputs/agent.stdout").read_text() == "yes\n"


async def test_an_agent_above_its_bounds_fails_by_name_and_no_other_session_with_it(
    run: Runner, stand_in: Any
) -> None:
    many = "for n in $(seq 60); do sleep 60 & done; sleep 60"
    jobs = [
        Job(Task(name, "go", payload={"answer": "yes"}, files={"do.sh": command}), "grp")
        for name, command in (("bomb", many), ("calm", "echo yes"))
    ]

    results = await run("sh do.sh", jobs, bounds=Bounds(processes=40))

    bomb, calm = sorted(results, key=lambda result: result.task_id)
    assert bomb.outcome is Outcome.AGENT_ERROR
    assert "processes, and at most 40 are permitted (agent.bounds)" in bomb.error
    assert (calm.outcome, calm.error) == (Outcome.COMPLETED, "")


async def test_an_agent_that_the_engine_failed_is_infrastructure(
    run: Runner, stand_in: Any
) -> None:
    stand_in.fault = "upstream_unreachable"

    (result,) = await run("exit 1", retries=0)

    assert (result.outcome, result.scores) == (Outcome.INFRASTRUCTURE, {})
    assert stand_in.sealed == {result.session_id: "infrastructure"}


async def test_a_guards_finding_is_recorded_with_its_mode_beside_the_scores_as_they_are(
    run: Runner, stand_in: Any
) -> None:
    stand_in.sampled = [{"turn": 1, "name": "bash", "arguments": {"command": "git log"}}]

    (warned,) = await run("echo yes")
    (zeroed,) = await run("echo yes", guards="zero")
    (quarantined,) = await run("echo yes", guards="quarantine")

    for result, mode in ((warned, "warn"), (zeroed, "zero"), (quarantined, "quarantine")):
        assert result.scores == {"reward": 1.0}
        score, finding = result.rewards
        assert (score.name, score.value, score.kind) == ("reward", 1.0, "score")
        assert (finding.name, finding.value, finding.kind) == ("git_history", 1.0, "finding")
        assert (finding.mode, finding.detail["turns"]) == (mode, [1])
        sent = [one for one in stand_in.rewards if one["name"] == "git_history"]
        assert {(one["kind"], one["mode"]) for one in sent} >= {("finding", mode)}
    assert (warned.outcome, zeroed.outcome) == (Outcome.COMPLETED, Outcome.COMPLETED)
    assert quarantined.outcome is Outcome.QUARANTINED
    assert stand_in.sealed[quarantined.session_id] == "quarantined"


async def test_an_agent_out_of_time_is_scored_on_what_it_left(run: Runner, stand_in: Any) -> None:
    def kept(delivery: Delivery) -> float:
        return float((delivery.workspace / "half").exists() and delivery.exit_code is None)

    (result,) = await run("touch half; sleep 60", timeout_s=0.5, verifier=FunctionVerifier(kept))

    assert (result.outcome, result.exit_code) == (Outcome.TIMEOUT, None)
    assert result.scores == {"reward": 1.0}
    assert stand_in.sealed == {result.session_id: "timeout"}


async def test_the_harness_gets_its_session_its_files_and_a_home_of_its_own(
    run: Runner, stand_in: Any
) -> None:
    (result,) = await run(
        'echo "$OPENAI_BASE_URL $OPENAI_API_KEY $HOME $(cat given.txt) {prompt} {model}"',
        model="named",
    )

    number = result.session_id.removeprefix("ses_")
    home = run.directory / "place-0" / "home"
    assert result.answer == (
        f"{stand_in.url}/s/{result.session_id}/v1 key-{number} {home} "
        "from the task the prompt named"
    )


async def test_sessions_one_after_another_work_under_the_same_path(run: Runner) -> None:
    results = await run("pwd", [Job(TASK)] * 5, parallel=2, keep_directories=True)

    # As many are prepared, and verified, as run.
    places = [run.directory / f"place-{number}" / "workspace" for number in range(3 * 2)]
    assert {Path(result.answer) for result in results} <= set(places)
    kept = {path.name for path in run.directory.iterdir()}
    assert kept == {result.session_id for result in results}


async def test_a_place_that_somebody_else_has_is_left_alone(run: Runner) -> None:
    (run.directory / "place-0" / "workspace").mkdir(parents=True)
    (run.directory / "place-0" / "workspace" / "theirs").touch()

    (result,) = await run("pwd; rm -f theirs")

    assert Path(result.answer) == run.directory / "place-1" / "workspace"
    assert (run.directory / "place-0" / "workspace" / "theirs").exists()
    assert not (run.directory / "place-1").exists()


async def test_a_place_is_free_before_its_folder_is_removed(
    run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = run.directory / "place-0"

    def remove(folder: Path) -> None:
        remove_folder(folder)
        taken.mkdir()

    monkeypatch.setattr(local, "remove_folder", remove)
    await run("pwd")

    assert [*run.directory.iterdir()] == [taken], "another machine took it, and keeps it"


async def test_a_group_is_one_task_and_another_group_another(run: Runner, stand_in: Any) -> None:
    jobs = list(grouped([Task("a", "p"), Task("b", "p")], 3))

    results = await run("echo", jobs, verifier=FunctionVerifier(lambda _: 0.0))

    groups = {(result.task_id, result.group_id) for result in results}
    assert len(results) == 6
    assert len(groups) == len({group for _, group in groups}) == 2
    assert len({result.session_id for result in results}) == 6


async def test_no_more_run_at_once_than_allowed_and_none_is_left_out(
    run: Runner,
) -> None:
    seen: list[RolloutResult] = []
    command = "date +%s%N > began; sleep 0.5; date +%s%N > ended"
    jobs = [Job(Task(str(number), "p")) for number in range(9)]

    results = await run(
        command,
        jobs,
        parallel=3,
        progress=seen.append,
        verifier=FunctionVerifier(lambda _: 0.0),
        keep_directories=True,
    )

    marks = [
        (int(file.read_text()), change)
        for name, change in (("began", 1), ("ended", -1))
        for file in run.directory.glob(f"ses_*/workspace/{name}")
    ]
    assert len(marks) == 18
    running = peak = 0
    for _, change in sorted(marks):
        running += change
        peak = max(peak, running)
    assert peak == 3
    assert seen == results
    assert {result.task_id for result in results} == {str(number) for number in range(9)}


async def test_a_proxy_that_fails_once_costs_one_retry(run: Runner, stand_in: Any) -> None:
    stand_in.failing = 1

    (result,) = await run("echo yes")

    assert (result.outcome, result.attempts) == (Outcome.COMPLETED, 2)


async def test_a_session_whose_reward_is_lost_is_infrastructure_and_run_again(
    run: Runner, stand_in: Any
) -> None:
    """Its tokens have no reward to be trained with, so it must not look completed."""
    stand_in.losing_rewards = 1

    (result,) = await run("echo yes")

    assert (result.outcome, result.attempts) == (Outcome.COMPLETED, 2)
    assert stand_in.sealed == {"ses_0": "infrastructure", result.session_id: "completed"}


async def test_retries_end_and_the_failure_is_the_result(run: Runner, stand_in: Any) -> None:
    stand_in.failing = 100

    (result,) = await run("echo yes", retries=2)

    assert (result.outcome, result.attempts, result.session_id) == (
        Outcome.INFRASTRUCTURE,
        3,
        None,
    )
    assert "503" in result.error


async def test_an_agents_failure_is_never_tried_again(run: Runner, stand_in: Any) -> None:
    (result,) = await run("exit 1", retries=5)

    assert result.attempts == 1
    assert len(stand_in.sessions) == 1


async def test_a_lost_runtime_is_infrastructure(run: Runner, stand_in: Any) -> None:
    class Losing(ProcessProvider):
        lost = 0

        def open(self, request: SandboxRequest) -> AbstractAsyncContextManager[ProcessSandbox]:
            self.lost += 1
            if self.lost == 1:
                raise SandboxLost("gone")
            return super().open(request)

    (result,) = await run("echo yes", sandbox=Losing())

    assert (result.outcome, result.attempts) == (Outcome.COMPLETED, 2)
    assert sorted(stand_in.sealed.values()) == ["completed", "infrastructure"]


@pytest.mark.parametrize("gone", ["$PWD", "$(dirname $PWD)"])
async def test_an_agent_that_removes_its_directories_fails_and_nothing_else_does(
    run: Runner, stand_in: Any, gone: str
) -> None:
    (result,) = await run(
        f'echo yes > answer; rm -rf "{gone}"; true', verifier=CommandVerifier("test -e answer")
    )

    assert (result.outcome, result.scores) == (Outcome.COMPLETED, {"reward": 0.0})
    assert stand_in.sealed == {result.session_id: "completed"}


async def test_a_verifier_without_a_verdict_is_infrastructure(run: Runner, stand_in: Any) -> None:
    def undecided(delivery: Delivery) -> float:
        raise VerifierError("the grader is down")

    (result,) = await run("echo yes", verifier=FunctionVerifier(undecided), retries=0)

    assert (result.outcome, result.error) == (Outcome.INFRASTRUCTURE, "the grader is down")
    assert not stand_in.rewards
    assert stand_in.sealed == {result.session_id: "infrastructure"}


async def test_a_seal_whose_answer_cannot_be_read_leaves_the_first_failure_to_tell(
    run: Runner, stand_in: Any
) -> None:
    def undecided(delivery: Delivery) -> float:
        raise VerifierError("the grader is down")

    stand_in.misencoding_seals = True
    (result,) = await run("echo yes", verifier=FunctionVerifier(undecided), retries=0)

    assert (result.outcome, result.error) == (Outcome.INFRASTRUCTURE, "the grader is down")


@pytest.mark.parametrize("prompt", ["x" * 200_000, "a\0b"], ids=["too long", "with a NUL"])
async def test_a_prompt_that_no_process_takes_fails_its_own_task_at_once(
    stand_in: Any, tmp_path: Path, prompt: str
) -> None:
    tasks = [Task("unfit", prompt, payload={"answer": "x"}), TASK]
    async with Client(stand_in.url) as client:
        rollout = Rollout(
            client,
            Command(("sh", "-c", "echo yes", "{prompt}")),
            LocalFleet(ProcessProvider(), ExactAnswer()),
            RolloutSettings(tmp_path / "sessions", timeout_s=20),
        )
        results = await rollout.collect(grouped(tasks, 1))

    unfit, other = sorted(results, key=lambda result: result.task_id == TASK.id)
    assert (unfit.outcome, unfit.attempts) == (Outcome.INFRASTRUCTURE, 1)
    assert unfit.error.startswith("cannot start sh: ")
    assert stand_in.sealed[unfit.session_id] == "infrastructure"
    assert other.outcome is Outcome.COMPLETED


@pytest.mark.parametrize(
    "files",
    [
        {"x" * 300: "long"},
        {"/".join(["deep" * 40] * 40): "long in all"},
        {"a\0b": "NUL"},
        {".": "the workspace"},
        {"a": "file", "a/b": "below a file"},
        {"a/b": "file", "a": "its folder"},
        {"a": "half a \ud800 character"},
    ],
    ids=lambda files: next(iter(files.values())),
)
@pytest.mark.parametrize("sandbox", [ProcessProvider, ForkedProvider])
async def test_a_file_that_no_folder_takes_fails_its_own_task_at_once(
    stand_in: Any, tmp_path: Path, files: dict[str, str], sandbox: Callable[[], SandboxProvider]
) -> None:
    script = tmp_path / "agent.py"
    script.write_text("print('yes')")
    tasks = [Task("unfit", "p", payload={"answer": "x"}, files=files), TASK]
    running = sandbox()
    async with Client(stand_in.url) as client:
        rollout = Rollout(
            client,
            PythonAgent(script),
            LocalFleet(running, ExactAnswer()),
            RolloutSettings(tmp_path / "sessions", timeout_s=20),
        )
        results = await rollout.collect(grouped(tasks, 1))
    await running.close()

    unfit, other = sorted(results, key=lambda result: result.task_id == TASK.id)
    assert (unfit.outcome, unfit.attempts) == (Outcome.INFRASTRUCTURE, 1)
    assert unfit.error.startswith("cannot write the file ")
    assert stand_in.sealed[unfit.session_id] == "infrastructure"
    assert other.outcome is Outcome.COMPLETED


async def test_a_task_without_what_its_verifier_needs_is_not_tried_again(
    run: Runner, stand_in: Any
) -> None:
    (result,) = await run("echo yes", [Job(Task("t", "p"))], retries=5)

    assert (result.outcome, result.attempts) == (Outcome.INFRASTRUCTURE, 1)
    assert stand_in.sealed == {"ses_0": "infrastructure"}


async def test_what_no_retry_can_mend_ends_the_rollout(run: Runner, stand_in: Any) -> None:
    class Missing(ProcessProvider):
        def open(self, request: SandboxRequest) -> AbstractAsyncContextManager[ProcessSandbox]:
            raise NotLaunchable("not installed")

    with pytest.raises(NotLaunchable):
        await run("echo yes", sandbox=Missing())
    assert list(stand_in.sealed.values()) == ["cancelled"]

    stand_in.url += "/elsewhere"
    with pytest.raises(ControlError, match="404"):
        await run("echo yes")


async def test_what_the_adapter_cannot_launch_opens_no_session(run: Runner, stand_in: Any) -> None:
    with pytest.raises(NotLaunchable):
        await run("echo {nothing}")
    assert not stand_in.sessions


async def test_a_session_that_is_being_sealed_when_the_rollout_ends_is_waited_for(
    run: Runner, stand_in: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Missing(ProcessProvider):
        wait_s = 0.0

        @asynccontextmanager
        async def open(self, request: SandboxRequest) -> AsyncIterator[ProcessSandbox]:
            self.wait_s += 0.1
            await asyncio.sleep(self.wait_s)
            raise NotLaunchable("not installed")
            yield ProcessSandbox(request.directory)

    stand_in.seal_wait_s = 0.3
    with pytest.raises(NotLaunchable):
        await run("echo yes", [Job(TASK)] * 2, sandbox=Missing())
    assert asyncio.all_tasks() == {asyncio.current_task()}, "no seal outlives its client"
    assert list(stand_in.sealed.values()) == ["cancelled"] * 2
    assert not caplog.records


async def test_leaving_early_ends_what_still_runs(
    run: Runner,
    stand_in: Any,
    tmp_path: Path,
    text_of: TextOf,
    assert_gone: AssertGone,
) -> None:
    jobs = [Job(Task(str(number), "p")) for number in range(3)]
    running = asyncio.create_task(run("echo $$ > pid; exec sleep 60", jobs))
    for number in range(3):
        await text_of(run.directory / f"place-{number}/workspace/pid")

    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    await assert_gone(tmp_path)
    assert list(stand_in.sealed.values()) == ["cancelled"] * 3


async def test_a_session_that_is_made_while_the_rollout_is_cancelled_is_sealed(
    run: Runner, stand_in: Any
) -> None:
    stand_in.create_wait_s = 0.3
    running = asyncio.create_task(run("echo yes"))
    while not stand_in.sessions:  # noqa: ASYNC110 - it stands in another thread
        await asyncio.sleep(0.01)

    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    assert stand_in.sealed == {"ses_0": "cancelled"}


async def test_a_cancellation_is_told_whatever_the_proxy_answers_meanwhile(
    run: Runner, stand_in: Any, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in.create_wait_s, stand_in.garbling = 0.3, True
    running = asyncio.create_task(run("echo yes"))
    while not stand_in.sessions:  # noqa: ASYNC110 - it stands in another thread
        await asyncio.sleep(0.01)
    (session,) = (task for task in asyncio.all_tasks() if "_with_retries" in repr(task))

    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    assert session.cancelled()
    assert "a session may stay unsealed: the proxy answered 201" in caplog.text


INTERRUPTED = """
import asyncio, sys
from pathlib import Path
from bridle.harnesses.adapters import Command
from bridle.harnesses.adapters.python_agent import PythonAgent
from bridle.harnesses.client import Client
from bridle.harnesses.fleet import LocalFleet
from bridle.harnesses.rollout import Job, Rollout, RolloutSettings
from bridle.harnesses.sandboxes import ProcessProvider
from bridle.harnesses.tasks.task import Task
from bridle.harnesses.verifiers import ExactAnswer

async def main():
    async with Client(sys.argv[1]) as client:
        adapter = Command(("sh", "-c", "echo $$ > pid; exec sleep 60"))
        settings = RolloutSettings(Path(sys.argv[2]) / "sessions")
        rollout = Rollout(client, adapter, LocalFleet(ProcessProvider(), ExactAnswer()), settings)
        await rollout.collect([Job(Task(str(n), "p")) for n in range(2)])

asyncio.run(main())
"""


async def test_ctrl_c_kills_every_child(
    stand_in: Any, tmp_path: Path, text_of: TextOf, assert_gone: AssertGone
) -> None:
    process = subprocess.Popen(  # noqa: ASYNC220 - to be interrupted, not awaited
        [sys.executable, "-c", INTERRUPTED, stand_in.url, str(tmp_path)],
        stderr=subprocess.DEVNULL,
    )
    for number in range(2):
        await text_of(tmp_path / f"sessions/place-{number}/workspace/pid")

    process.send_signal(signal.SIGINT)

    assert process.wait(10) == -signal.SIGINT
    await assert_gone(tmp_path)
    assert list(stand_in.sealed.values()) == ["cancelled"] * 2
