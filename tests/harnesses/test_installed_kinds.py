"""Test that the calls of installed harnesses get the kinds that the script meant.

The kinds are the work, sub-agents at once, titles, and summaries of a conversation that had become
too long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bridle.bench.delegating_policy import DELEGATIONS, TASK, Delegation, script
from bridle.bench.shell_policy import train_bench_tokenizer
from bridle.engine.scripted import ScriptedEngine
from bridle.harnesses.client import Client
from bridle.harnesses.fleet import LocalFleet
from bridle.harnesses.rollout import Job, Rollout, RolloutSettings
from bridle.harnesses.sandboxes import ProcessProvider
from bridle.harnesses.tasks.task import Task
from bridle.harnesses.verifiers import RegexAnswer
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.reconstruct.audit import audit_session
from bridle.reconstruct.kinds.kinds import with_kinds
from bridle.store.reading.queries import CallRow, Reader
from bridle.store.records import CallKind

pytestmark = pytest.mark.harness


def content_of(call: CallRow) -> str:
    return str(call.replies[0].content) if call.replies else ""


def intended(call: CallRow) -> CallKind:
    """Return the kind that the script meant the call to be, by its answer."""
    content, reasoning = content_of(call), call.replies[0].reasoning or "" if call.replies else ""
    if "SUMMARY:" in content:
        return CallKind.COMPACTION
    if "A title" in content:
        return CallKind.SIDE
    if ("count." in reasoning and "Others" not in reasoning) or "I counted." in reasoning:
        return CallKind.SUBAGENT
    return CallKind.MAIN


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Callable[[Delegation], tuple[str, Reader]]]:
    with ExitStack() as stack:

        def start(case: Delegation) -> tuple[str, Reader]:
            train_bench_tokenizer(tmp_path / "model")
            engine = stack.enter_context(
                ScriptedEngine(tmp_path / "model", script(case), max_model_len=1_000_000)
            )
            store = str(tmp_path / "bridle.db")
            settings = ProxySettings(engine.base_url, store, tokenizer_dir=tmp_path / "model")
            server = stack.enter_context(ProxyServer(settings))
            return server.base_url, stack.enter_context(Reader(store))

        yield start


@pytest.mark.parametrize("name", sorted(DELEGATIONS))
async def test_work_sub_agents_titles_and_summaries_are_told_apart_as_they_were_meant(
    stage: Callable[[Delegation], tuple[str, Reader]], tmp_path: Path, name: str
) -> None:
    case = DELEGATIONS[name]
    url, reader = stage(case)
    task = Task("lists", "lists", TASK)
    async with Client(url) as client:
        settings = RolloutSettings(tmp_path / "sessions", timeout_s=240, retries=0)
        rollout = Rollout(
            client, case.adapter, LocalFleet(ProcessProvider(), RegexAnswer("well")), settings
        )
        (result,) = await rollout.collect([Job(task)])

    assert result.session_id is not None, result
    calls = with_kinds(reader.calls(result.session_id))
    told = [(call.kind, content_of(call)[:40]) for call in calls]
    assert [call.kind for call in calls] == [intended(call) for call in calls], told
    kinds = {call.kind for call in calls}
    assert {CallKind.MAIN, CallKind.SUBAGENT, CallKind.COMPACTION} <= kinds
    assert (CallKind.SIDE in kinds) is case.titles
    assert result.scores == {"reward": 1.0}, result
    assert audit_session(reader, result.session_id, bodies=True).clean
