"""Verifiers read what was delivered, and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from bridle.harnesses.sandboxes import ProcessSandbox
from bridle.harnesses.tasks.environments.loader import PLAYED
from bridle.harnesses.tasks.task import Task
from bridle.harnesses.verifiers import (
    CommandVerifier,
    Delivery,
    ExactAnswer,
    FunctionVerifier,
    NoVerdict,
    NumberAnswer,
    RegexAnswer,
    TaskUnfit,
    Verifier,
    VerifierError,
)
from bridle.harnesses.verifiers.environments import rewards_of
from bridle.harnesses.verifiers.harbor import rewards_in


def delivered(answer: str, payload: Mapping[str, Any], workspace: Path = Path()) -> Delivery:
    sandbox = ProcessSandbox(workspace / ".sandbox")
    return Delivery(Task("t", "p", payload=payload), answer, workspace, 0, sandbox)


async def reward(verifier: Verifier, delivery: Delivery) -> float:
    return (await verifier(delivery))["reward"]


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("42", 1.0),
        ("The answer is 42.", 1.0),
        ("They cost 42.0", 1.0),
        ("41", 0.0),
        ("", 0.0),
        ("6 times 7 is 42", 0.0),
        ("420", 0.0),
        ("-42", 0.0),
    ],
)
async def test_a_number_answer_holds_the_one_right_number(answer: str, score: float) -> None:
    assert await reward(NumberAnswer(), delivered(answer, {"answer": 42})) == score


async def test_thousands_may_be_separated() -> None:
    assert await reward(NumberAnswer(), delivered("It is 1,250 now", {"answer": 1250})) == 1.0


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("It is .5", 0.5),
        ("$-.50", -0.5),
        ("Nr.5", 5),
        ("it is...5", 5),
        ("\N{MINUS SIGN}42", -42),
        ("x=\N{MINUS SIGN}1,250.5", -1250.5),
    ],
)
async def test_a_number_is_read_with_its_sign_and_its_point(answer: str, number: float) -> None:
    assert await reward(NumberAnswer(), delivered(answer, {"answer": number})) == 1.0


async def test_an_exact_answer_ignores_case_and_space_only() -> None:
    payload = {"answer": "apple pie"}

    assert await reward(ExactAnswer(), delivered("  Apple  pie\n", payload)) == 1.0
    assert await reward(ExactAnswer(), delivered("an apple pie", payload)) == 0.0


async def test_a_pattern_comes_from_the_verifier_or_the_task() -> None:
    assert await reward(RegexAnswer(r"\bpie\b"), delivered("a pie.", {})) == 1.0
    assert await reward(RegexAnswer(), delivered("a cake", {"pattern": "^a p"})) == 0.0


async def test_a_command_judges_the_workspace(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("done")
    payload = {"verify": "grep -q done note.txt"}

    assert await reward(CommandVerifier(), delivered("", payload, tmp_path)) == 1.0
    assert await reward(CommandVerifier("test -f x"), delivered("", {}, tmp_path)) == 0.0


async def test_a_command_sees_no_provider_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")

    verifier = CommandVerifier('test -z "$OPENAI_API_KEY"')
    assert await reward(verifier, delivered("", {}, tmp_path)) == 1.0


@pytest.mark.parametrize(
    "started", ["(sleep 0.6; touch late)", "setsid sh -c 'sleep 0.6; touch late'"]
)
@pytest.mark.parametrize(
    ("then", "timeout_s", "score"), [("sleep 60", 0.2, 0.0), ("sleep 0.1", 20, 1.0)]
)
async def test_what_a_command_started_is_killed_when_it_ends_or_hangs(
    tmp_path: Path, started: str, then: str, timeout_s: float, score: float
) -> None:
    verifier = CommandVerifier(f"{started} & {then}", timeout_s=timeout_s)

    assert await reward(verifier, delivered("", {}, tmp_path)) == score
    time.sleep(0.8)  # noqa: ASYNC251 - the killed child must not get to write
    assert not (tmp_path / "late").exists()


async def test_a_function_returns_a_number_or_named_scores() -> None:
    assert await FunctionVerifier(lambda d: len(d.answer))(delivered("abc", {})) == {"reward": 3.0}
    named = FunctionVerifier(lambda d: {"style": 1, "length": True})
    assert await named(delivered("abc", {})) == {"style": 1.0, "length": 1.0}


async def test_a_function_may_be_async() -> None:
    async def judged(delivery: Delivery) -> float:
        return float(delivery.answer == "abc")

    assert await FunctionVerifier(judged)(delivered("abc", {})) == {"reward": 1.0}


def test_a_function_that_hangs_does_not_keep_a_cancelled_program() -> None:
    over = threading.Event()

    async def out_of_time() -> None:
        hanging = FunctionVerifier(lambda _: over.wait(20))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(hanging(delivered("", {})), 0.05)

    started = time.monotonic()
    asyncio.run(out_of_time())
    assert time.monotonic() - started < 10
    over.set()


def raises(delivery: Delivery) -> float:
    return float(delivery.task.payload["wanted"])


def leaves(delivery: Delivery) -> float:
    raise SystemExit("enough")


def waits(delivery: Delivery) -> float:
    time.sleep(3)
    return 1.0


async def waits_later(delivery: Delivery) -> float:
    await asyncio.sleep(30)
    return 1.0


@pytest.mark.parametrize("function", [waits, waits_later])
async def test_a_function_that_takes_too_long_gave_no_verdict(function: Any) -> None:
    with pytest.raises(NoVerdict, match=r"more than 0\.2 s"):
        await FunctionVerifier(function, timeout_s=0.2)(delivered("", {}))


async def raises_later(delivery: Delivery) -> float:
    return raises(delivery)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (raises, "KeyError: 'wanted'"),
        (raises_later, "KeyError: 'wanted'"),
        (leaves, "SystemExit: enough"),
        (lambda _: None, "TypeError"),
        (lambda _: float("nan"), "reward is nan"),
        (lambda _: {"style": float("inf")}, "style is inf"),
    ],
)
async def test_a_function_that_gives_no_score_gave_no_verdict(function: Any, why: str) -> None:
    with pytest.raises(VerifierError, match=why):
        await FunctionVerifier(function)(delivered("abc", {}))


@pytest.mark.parametrize("verifier", [ExactAnswer(), NumberAnswer(), RegexAnswer()])
async def test_a_missing_expectation_is_no_score_of_zero(verifier: Verifier) -> None:
    with pytest.raises(TaskUnfit, match="payload"):
        await verifier(delivered("42", {}))


@pytest.mark.parametrize(
    ("verifier", "payload"),
    [(NumberAnswer(), {"answer": "1,250"}), (RegexAnswer(), {"pattern": "("})],
)
async def test_an_expectation_that_cannot_be_met_is_no_score_of_zero(
    verifier: Verifier, payload: Mapping[str, Any]
) -> None:
    with pytest.raises(TaskUnfit, match="task's"):
        await verifier(delivered("1,250", payload))


HOSTILE_RESULTS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "another file": lambda path: path.symlink_to(__file__),
    "folder": lambda path: path.mkdir(),
    "huge": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40),
    "nested": lambda path: path.write_text("[" * 100_000),
    "long name": lambda path: path.write_text(json.dumps({"x" * 1000: 1})),
    "many names": lambda path: path.write_text(json.dumps(dict.fromkeys(map(str, range(999)), 1))),
    "infinite": lambda path: path.write_text("1" + "0" * 400),
    "text": lambda path: path.write_text('{"reward": "1"}'),
}


@pytest.mark.parametrize("name", ["reward.json", "reward.txt"])
@pytest.mark.parametrize("kind", HOSTILE_RESULTS)
def test_a_result_file_that_is_none_is_no_verdict(tmp_path: Path, kind: str, name: str) -> None:
    HOSTILE_RESULTS[kind](tmp_path / name)
    with pytest.raises(NoVerdict):
        rewards_in(tmp_path)


def test_a_bare_number_is_a_verdict_as_text_alone(tmp_path: Path) -> None:
    (tmp_path / "reward.txt").write_text("0.5")
    assert rewards_in(tmp_path) == {"reward": 0.5}
    (tmp_path / "reward.json").write_text("0.5")
    with pytest.raises(NoVerdict, match="no object of rewards"):
        rewards_in(tmp_path)


@pytest.mark.parametrize(
    "played", ["", "[]", "[" * 100_000, '{"rewards": {"reward": "x"}}', '{"rewards": {"r": 1e999}}']
)
async def test_an_environments_result_that_cannot_be_read_is_no_verdict(
    tmp_path: Path, played: str
) -> None:
    delivery = delivered("", {}, tmp_path)
    await delivery.sandbox.write({delivery.sandbox.place.logs / PLAYED: played})
    with pytest.raises(NoVerdict):
        await rewards_of(delivery)
