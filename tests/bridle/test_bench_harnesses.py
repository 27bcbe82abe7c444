"""``bridle bench harnesses`` against small harnesses of our own, good ones and bad ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bridle.bench.harness_cases import CASES, HarnessCase
from bridle.bench.harnesses import Report, bench_harnesses, chosen, markdown
from bridle.harnesses.adapters import Command, PythonAgent
from bridle.store.records import Continuation

AGENT = """
import json, os, subprocess, sys
import httpx

TOOL = {"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}
messages = [{"role": "user", "content": sys.argv[-1]}]


def ask(messages, tools=[TOOL]):
    body = {"model": "policy", "messages": messages, "tools": tools ASKED}
    reply = httpx.post(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json=body if tools else {**body, "tools": None},
        headers={"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
        trust_env=False,
        timeout=60,
    )
    reply.raise_for_status()
    return reply.json()["choices"][0]["message"]

BEFORE
while (message := ask(messages)).get("tool_calls"):
    messages.append({"role": "assistant", "tool_calls": message["tool_calls"]})
    for call in message["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        printed = subprocess.run(["sh", "-c", command], capture_output=True, text=True).stdout
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": printed})
    AFTER
print(message["content"])
"""


@pytest.fixture
def case(tmp_path: Path) -> Callable[..., HarnessCase]:
    """A harness that does more ``before`` its first call and ``after`` every turn.

    Its requests have the fields ``asked`` as well.
    """

    def make(before: str = "", after: str = "pass", asked: str = "") -> HarnessCase:
        script = tmp_path / "agent.py"
        text = AGENT.replace("BEFORE", before).replace("AFTER", after).replace("ASKED", asked)
        script.write_text(text)
        return HarnessCase("small", "chat", lambda: PythonAgent(script, name="small"), False)

    return make


async def report_of(case: HarnessCase) -> Report:
    return await bench_harnesses([case], turns=2, timeout_s=60)


async def test_a_harness_that_drops_reasoning_is_one_row_exactly_and_breaks_when_rendered(
    case: Callable[..., HarnessCase],
) -> None:
    report = await report_of(case())

    figures = report.as_data()["small"]
    assert figures["exact"] == {
        "sessions": 1,
        "rows_per_session": 1.0,
        "breaks": 0,
        "unexplained": 0,
        "breaks_by_reason": {},
        "trained_share": 1.0,
        "masked": {},
        "calls": 3,
        "calls_by_kind": {"main": 3},
        "problems": [],
    }
    assert figures["rendered"]["rows_per_session"] == 3.0
    assert figures["rendered"]["breaks_by_reason"] == {
        "arguments_reserialised": 2,
        "edited": 1,
        "reasoning_dropped": 2,
    }
    assert report.failures() == []
    on_what = "arguments_reserialised 2, edited 1, reasoning_dropped 2"
    row = f"| small | – | – | 3 | 1 | 100.0% | 0 | 0 | 3 | 2 | {on_what} |"
    assert row in markdown(report)


async def test_a_harness_that_cannot_start_leaves_the_others_their_figures(
    case: Callable[..., HarnessCase],
) -> None:
    missing = HarnessCase("missing", "chat", lambda: Command(["no-such-command"]), False)

    report = await bench_harnesses([missing, case()], turns=2, timeout_s=60)

    assert report.figures["small"][Continuation.EXACT].rows == 1
    failures = report.failures()
    assert [line.split(":")[0] for line in failures] == ["missing (exact)", "missing (rendered)"]
    assert all("did not start: " in line and "no-such-command" in line for line in failures)
    assert "| missing | – | – | 0 | – | 0.0% | 0 | 0 | – | 0 | – |" in markdown(report)


async def test_the_report_shows_what_a_harness_at_temperature_0_leaves_to_train(
    case: Callable[..., HarnessCase],
) -> None:
    report = await report_of(case(asked=', "temperature": 0'))

    exact = report.figures["small"][Continuation.EXACT]
    assert exact.trained == 0
    assert f"| 0 | 0.0%, sampler_greedy {exact.masked.total()} | 0 | 0 |" in markdown(report)


async def test_a_title_asked_on_the_side_is_told_apart_and_no_row(
    case: Callable[..., HarnessCase],
) -> None:
    titles = '[{"role": "system", "content": "Titles."}, *messages]'
    report = await report_of(case(before=f"ask({titles}, None)"))

    exact = report.as_data()["small"]["exact"]
    assert (exact["rows_per_session"], exact["calls_by_kind"]) == (1.0, {"main": 3, "side": 1})
    assert report.failures() == []


async def test_a_harness_that_rewrites_its_history_fails_the_bench_with_the_reason_it_breaks_on(
    case: Callable[..., HarnessCase],
) -> None:
    report = await report_of(case(after="messages[0]['content'] += ' Hurry.'"))

    exact = report.figures["small"][Continuation.EXACT]
    assert exact.rows > 1
    assert exact.reasons == {"edited": 2}
    assert f"small (exact): {exact.rows} rows of 1 sessions" in report.failures()
    assert f"- small (exact): {exact.rows} rows of 1 sessions" in markdown(report)


async def test_a_harness_that_fails_fails_the_bench_with_its_own_words(
    case: Callable[..., HarnessCase],
) -> None:
    report = await report_of(case(before="sys.exit('out of order')"))

    assert len(report.failures()) == 3  # both runs, and no row in the exact one
    assert "agent_error" in report.failures()[0]
    assert "out of order" in report.failures()[0]


def test_all_harnesses_run_unless_some_are_chosen() -> None:
    assert chosen([]) == list(CASES.values())
    assert [case.name for case in chosen(["pi", "codex"])] == ["pi", "codex"]
    with pytest.raises(KeyError):
        chosen(["emacs"])
