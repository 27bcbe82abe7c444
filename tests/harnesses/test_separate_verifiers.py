"""A verifier that is named runs in a process of its own, which has bounds and is ended with it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bridle.harnesses.sandboxes import ProcessSandbox
from bridle.harnesses.sandboxes.bounds import Bounds
from bridle.harnesses.tasks.task import Task
from bridle.harnesses.verifiers import (
    Delivery,
    FunctionVerifier,
    NoVerdict,
    RegexAnswer,
    SeparateFunction,
    TaskUnfit,
    VerifierError,
)
from bridle.harnesses.verifiers.delivery import FunctionFault
from bridle.run.agents import VERIFIERS, verifier

CHECKS = """
import os, re, resource, signal, subprocess, sys, threading, time
from dataclasses import dataclass
from bridle.harnesses.verifiers import NoVerdict, TaskUnfit

loaded = [os.getpid()]
seen = []

def process(delivery):
    seen.append(1)
    return {"own": os.getpid(), "loaded": loaded[0], "seen": len(seen)}

def reads(delivery):
    return float((delivery.workspace / "made.txt").read_text())

def crashes(delivery):
    os.kill(os.getpid(), signal.SIGSEGV)

def exits(delivery):
    os._exit(3)

def leaves(delivery):
    sys.exit("enough")

def raises(delivery):
    return delivery.task.payload["wanted"]

def unfit(delivery):
    raise TaskUnfit("no such data")

def hangs(delivery):
    subprocess.Popen(["sh", "-c", f"sleep 100; touch {delivery.workspace}/late"])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    time.sleep(600)

def burns(delivery):
    while True:
        pass

def grows(delivery):
    return len(bytes(512 << 20))

def writes(delivery):
    (delivery.workspace / "big").write_bytes(bytes(3 << 20))

def opens(delivery):
    kept = [open("/dev/null") for _ in range(5000)]

def speaks(delivery):
    return {str(number): 1.0 for number in range(200_000)}

def commands(delivery):
    import asyncio
    from bridle.harnesses.sandboxes import Launch
    asyncio.run(delivery.sandbox.exec(Launch(("true",), {}, 1.0)))

def none(delivery):
    return None

def nan(delivery):
    return float("nan")

def environment(delivery):
    data = open(f"/proc/{os.getppid()}/environ").read() + open("/proc/self/environ").read()
    return float("sesame" in data or "sesame" in str(dict(os.environ)))

@dataclass(frozen=True)
class Options:
    most: float = 1.0

def optional(delivery, options=Options()):
    return options.most
optional.__annotations__["options"] = Options

async def later(delivery):
    return float(os.getpid())
"""


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("verifiers") / "checks.py"
    file.write_text(CHECKS)
    return file


named_once = functools.cache(verifier)


def delivered(
    tmp_path: Path, payload: Mapping[str, Any] | None = None, bounds: Bounds | None = None
) -> Delivery:
    sandbox = ProcessSandbox(tmp_path / "session").make()
    workspace = tmp_path / "session/workspace"
    task = Task("t", "p", payload=payload or {})
    return Delivery(task, "abc", workspace, 0, sandbox, bounds=bounds or Bounds())


async def test_a_session_is_verified_in_a_fork_of_a_process_that_has_the_function(
    checks: Path, tmp_path: Path
) -> None:
    named = verifier(f"{checks}:process")
    first, second = [dict(await named(delivered(tmp_path))) for _ in range(2)]
    assert first["loaded"] == second["loaded"] != os.getpid()
    assert len({first["own"], second["own"], first["loaded"], os.getpid()}) == 4
    assert first["seen"] == second["seen"] == 1, "nothing of one session is there in another"


async def test_sessions_are_verified_at_the_same_time(checks: Path, tmp_path: Path) -> None:
    (tmp_path / "session/workspace").mkdir(parents=True)
    (tmp_path / "session/workspace/made.txt").write_text("0.5")
    named = verifier(f"{checks}:reads")
    given = await asyncio.gather(*(named(delivered(tmp_path)) for _ in range(10)))
    assert given == [{"reward": 0.5}] * 10


@pytest.mark.parametrize(
    ("function", "kind", "why"),
    [
        ("crashes", NoVerdict, "ended with signal 11 before its verdict"),
        ("exits", NoVerdict, "ended with exit code 3 before its verdict"),
        ("leaves", FunctionFault, "SystemExit: enough"),
        ("raises", FunctionFault, "KeyError: 'wanted'"),
        ("unfit", TaskUnfit, "no such data"),
        ("hangs", NoVerdict, r"more than 1 s \(agent.bounds.verifier_s\)"),
        ("burns", NoVerdict, r"more than 1 s .*agent.bounds.verifier_s"),
        ("grows", NoVerdict, r"more than 256 MiB \(agent.bounds.memory_mb\)"),
        ("writes", NoVerdict, r"more than 2 MiB \(agent.bounds.disk_mb\)"),
        ("opens", NoVerdict, "more than 1024 files at a time"),
        ("speaks", NoVerdict, "report has more than 1048576 bytes"),
        ("commands", NoVerdict, "runs true in the sandbox is an async function"),
        ("none", FunctionFault, "TypeError"),
        ("nan", FunctionFault, "reward is nan"),
    ],
)
async def test_a_function_that_fails_or_exceeds_a_bound_costs_its_session_alone(
    checks: Path, tmp_path: Path, function: str, kind: type[VerifierError], why: str
) -> None:
    waits = function in ("hangs", "burns")
    bounds = Bounds(verifier_s=1.0 if waits else 60.0, memory_mb=256, disk_mb=2)
    named = verifier(f"{checks}:{function}")
    with pytest.raises(kind, match=why) as failed:
        await named(delivered(tmp_path, bounds=bounds))
    assert type(failed.value) is kind
    assert await named_once(f"{checks}:optional")(delivered(tmp_path)) == {"reward": 1.0}


async def test_a_function_that_takes_too_long_on_the_cpu_is_ended(
    checks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = asyncio.wait_for
    monkeypatch.setattr(asyncio, "wait_for", lambda one, _: waiting(one, 60.0))
    with pytest.raises(NoVerdict, match="more than 1 s of CPU"):
        await verifier(f"{checks}:burns")(delivered(tmp_path, bounds=Bounds(verifier_s=1.0)))


@pytest.mark.parametrize("cancelled", [True, False])
async def test_a_function_that_is_ended_takes_its_processes_along(
    checks: Path, tmp_path: Path, cancelled: bool
) -> None:
    bounds = Bounds(verifier_s=60.0 if cancelled else 2.0)
    named = named_once(f"{checks}:hangs")
    running = asyncio.ensure_future(named(delivered(tmp_path, bounds=bounds)))
    late = str(tmp_path / "session/workspace/late").encode()
    await wait_until(lambda: _runs(late))
    if cancelled:
        running.cancel()
    await asyncio.wait({running})
    await wait_until(lambda: not _runs(late))


async def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it never comes true")


def _runs(named: bytes) -> bool:
    """Return whether a process of this machine names it on its command line."""
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and named in Path(f"/proc/{name}/cmdline").read_bytes():
                return True
    return False


async def test_a_lost_process_costs_one_session_and_is_started_again(
    checks: Path, tmp_path: Path
) -> None:
    named = verifier(f"{checks}:process")
    os.kill(int((await named(delivered(tmp_path)))["loaded"]), 9)
    for _ in range(2):
        try:
            assert (await named(delivered(tmp_path)))["seen"] == 1.0
            break
        except VerifierError as error:
            assert error.retryable, "nobody's fault"  # noqa: PT017
    else:
        pytest.fail("the process is not started again")


async def test_the_process_has_no_key_of_bridles(
    checks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BRIDLE_ADMIN_KEY", "BRIDLE_ENGINE_API_KEY", "VLLM_API_KEY"):
        monkeypatch.setenv(name, "sesame")
    assert await verifier(f"{checks}:environment")(delivered(tmp_path)) == {"reward": 0.0}


async def test_options_reach_the_function(checks: Path, tmp_path: Path) -> None:
    named = verifier(f"{checks}:optional", {"optional": {"most": 7}})
    assert await named(delivered(tmp_path)) == {"reward": 7.0}


THREADED = """
import os, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
def check(delivery):
    return {"process": os.getpid()}
"""
ONCE = """
import os
if os.environ.get("IMPORTED") == "once":
    raise RuntimeError("imported twice")
os.environ["IMPORTED"] = "once"
def check(delivery):
    return {"process": os.getpid()}
"""


@pytest.mark.parametrize(
    ("source", "why"), [(THREADED, "its import starts 1 threads"), (ONCE, "imported twice")]
)
async def test_a_function_that_cannot_leave_the_runs_process_verifies_there_and_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    source: str,
    why: str,
) -> None:
    monkeypatch.setenv("IMPORTED", "")
    (tmp_path / "checks.py").write_text(source)
    named = verifier(f"{tmp_path}/checks.py:check")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert await named(delivered(tmp_path)) == {"process": float(os.getpid())}
    (said,) = [one.message for one in caplog.records if "verifier_not_separate" in one.message]
    assert why in said


async def test_a_task_that_cannot_be_sent_is_verified_in_the_runs_process(
    checks: Path, tmp_path: Path
) -> None:
    of_here = SimpleNamespace(function=lambda: None)
    given = await verifier(f"{checks}:process")(delivered(tmp_path, {"object": of_here}))
    assert given["own"] == os.getpid()


async def test_functions_with_a_state_of_this_process_stay_in_it(
    checks: Path, tmp_path: Path
) -> None:
    assert (await verifier(f"{checks}:later")(delivered(tmp_path)))["reward"] == os.getpid()
    VERIFIERS.register("of-this-test", lambda _: float(os.getpid()))
    assert isinstance(verifier("of-this-test"), FunctionVerifier)
    assert isinstance(verifier(f"{checks}:process"), SeparateFunction)


def test_a_verifier_serves_one_loop_after_another(checks: Path, tmp_path: Path) -> None:
    named = verifier(f"{checks}:process")

    async def several() -> list[Mapping[str, float]]:
        return await asyncio.gather(*(named(delivered(tmp_path)) for _ in range(5)))

    loaded = {given["loaded"] for _ in range(2) for given in asyncio.run(several())}
    assert len(loaded) == 1


async def test_an_answer_that_a_pattern_takes_years_for_is_no_verdict(tmp_path: Path) -> None:
    delivery = delivered(tmp_path, {"pattern": r"^(a+)+$"}, Bounds(verifier_s=0.5))
    hostile = Delivery(
        delivery.task,
        "a" * 60 + "!",
        delivery.workspace,
        0,
        delivery.sandbox,
        None,
        delivery.bounds,
    )
    with pytest.raises(NoVerdict, match=r"more than 0\.5 s"):
        await RegexAnswer()(hostile)
