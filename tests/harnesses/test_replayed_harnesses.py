"""Recorded sessions of installed programs, re-entered: ``make test-replay`` prints the sums."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from bridle.bench.harness_cases import CASES
from bridle.bench.shell_policy import PARALLEL, ShellPolicy, WorkedThrough, train_bench_tokenizer
from bridle.engine.scripted import ScriptedCall, ScriptedEngine, ScriptedReply, ScriptedRequest
from bridle.harnesses.client import Client, Origin
from bridle.harnesses.fleet import LocalFleet
from bridle.harnesses.rollout import Job, Rollout, RolloutResult, RolloutSettings
from bridle.harnesses.sandboxes import ProcessProvider
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.reconstruct.audit import audit_session
from bridle.reconstruct.session import LoadedSession
from bridle.store.reading.queries import Reader
from bridle.store.records import CallKind

pytestmark = pytest.mark.replay

POLICY = ShellPolicy(turns=4)
PROGRAMS = ("codex", "pi", "mini-swe-agent")
"""The programs of the sample; ``BRIDLE_REPLAY_PROGRAMS`` names others, or ``all``."""
ALL = (
    "codex",
    "claude-code",
    "qwen-code",
    "pi",
    "opencode",
    "mini-swe-agent",
    "langchain-chat",
    "langchain-responses",
)


@dataclass
class Sums:
    """The sums over the re-entries."""

    entered: int = 0
    equal: int = 0
    replayed: int = 0
    asked: int = 0
    """Engine calls for replayed turns."""
    conserved: int = 0
    noise: dict[str, int] = field(default_factory=dict)
    seconds: list[str] = field(default_factory=list)


def programs() -> tuple[str, ...]:
    chosen = os.environ.get("BRIDLE_REPLAY_PROGRAMS", "")
    return ALL if chosen == "all" else tuple(chosen.split()) or PROGRAMS


@pytest.fixture(scope="module")
def sums() -> Iterator[Sums]:
    found = Sums()
    yield found
    print(
        f"\n{found.entered} sessions re-entered; first live prompts bit-equal: {found.equal}; "
        f"{found.replayed} replayed turns, engine calls for them: {found.asked}; "
        f"tokens conserved: {found.conserved}; noise: {found.noise}"
    )
    print("\n".join(found.seconds))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    train_bench_tokenizer(directory)
    return directory


def lasting(request: ScriptedRequest) -> ScriptedReply:
    """Works as :data:`POLICY` does, in commands that last for a moment after their output.

    Qwen Code may report no output of a command that ends at once.
    """
    reply = POLICY(request)
    calls = [
        ScriptedCall(one.name, str(one.arguments).replace('.txt"', '.txt && sleep 0.3"'))
        for one in reply.tool_calls
    ]
    return replace(reply, tool_calls=tuple(calls))


@pytest.mark.parametrize("name", programs())
async def test_a_program_re_enters_its_session(
    name: str, model: Path, tmp_path: Path, sums: Sums
) -> None:
    store = str(tmp_path / "bridle.db")
    with (
        ScriptedEngine(model, lasting, max_model_len=1_000_000) as engine,
        ProxyServer(ProxySettings(engine.base_url, store, tokenizer_dir=model)) as proxy,
        Reader(store) as reader,
    ):
        adapter, task = CASES[name].adapter(), POLICY.task(name)
        settings = RolloutSettings(tmp_path / "sessions", parallel=1, timeout_s=120, retries=0)

        async def run(origin: Origin | None = None) -> RolloutResult:
            async with Client(proxy.base_url) as client:
                fleet = LocalFleet(ProcessProvider(), WorkedThrough())
                rollout = Rollout(client, adapter, fleet, settings)
                (result,) = await rollout.collect([Job(task, origin=origin)])
                await fleet.close()
            return result

        first = await run()
        assert first.scores == {"reward": 1.0}, first
        recorded = LoadedSession.load(reader, first.session_id or "")
        work = [call for call in recorded.calls if call.kind is CallKind.MAIN]
        branch = work[-2]
        asked = len(engine.requests)
        again = await run(Origin(recorded.id, branch.id))
        assert again.session_id is not None
        now = LoadedSession.load(reader, again.session_id)
        shown = [(call.replayed_call_id, call.status, call.notes) for call in now.calls]
        assert again.scores == {"reward": 1.0}, "\n".join(map(str, shown))

        replayed = [call for call in now.calls if call.replayed_call_id is not None]
        live = [call for call in now.calls if call.replayed_call_id is None]
        before = recorded.calls[: [call.id for call in recorded.calls].index(branch.id)]
        assert {call.replayed_call_id for call in replayed} == {call.id for call in before}
        assert len(replayed) >= 3
        assert sum(len(call.replies[0].tool_calls) for call in replayed) >= 3 * PARALLEL - 2
        grafted = next(c for c in live if any(n.name == "replay_live" for n in c.notes))
        prompts = [reader.prompt_token_ids(call.id) for call in (branch, grafted)]
        assert prompts[0] is not None
        assert prompts[1] is not None
        assert prompts[0].tolist() == prompts[1].tolist()
        assert {call.break_reason for call in now.calls if call.kind is CallKind.MAIN} == {None}
        audited = audit_session(reader, now.id, bodies=True)
        assert audited.clean, audited.violations
        assert audited.conservation.captured == sum(call.sampled_tokens or 0 for call in live)

        sums.entered += 1
        sums.equal += 1
        sums.replayed += len(replayed)
        sums.asked += len(engine.requests) - asked - len(live)
        sums.conserved += audited.conservation.balanced
        for call in now.calls:
            for note in call.notes:
                if note.name == "replay_noise":
                    sums.noise[name] = sums.noise.get(name, 0) + 1
        sums.seconds.append(f"{name}: {first.seconds:.1f} s recorded, {again.seconds:.1f} s again")
        assert len(engine.requests) - asked == len(live), "an engine call for a replayed turn"
