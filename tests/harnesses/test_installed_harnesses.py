"""The installed harnesses, unmodified, each on a scripted task through the real proxy."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bridle.bench.harness_cases import CASES, HarnessCase
from bridle.bench.shell_policy import (
    PARALLEL,
    SHELLS,
    ShellPolicy,
    WorkedThrough,
    train_bench_tokenizer,
)
from bridle.engine.scripted import ScriptedCall, ScriptedEngine, ScriptedReply, ScriptedRequest
from bridle.harnesses.adapters import PythonAgent
from bridle.harnesses.adapters.base import Adapter
from bridle.harnesses.client import Client, SessionRequest
from bridle.harnesses.episode import Outcome
from bridle.harnesses.fleet import LocalFleet
from bridle.harnesses.install import search_path
from bridle.harnesses.rollout import Job, Rollout, RolloutResult, RolloutSettings
from bridle.harnesses.run import run_command, seal_session, session_variables
from bridle.harnesses.sandboxes import ForkedProvider, ProcessProvider, SandboxProvider
from bridle.harnesses.sandboxes.container.layers import LAYER_OF, Layer
from bridle.harnesses.tasks.task import Task
from bridle.harnesses.verifiers import CommandVerifier, NumberAnswer, RegexAnswer, Verifier
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.recipes.reproduce import editing
from bridle.reconstruct.audit import audit_session
from bridle.reconstruct.kinds.kinds import with_kinds
from bridle.run.agents import agent
from bridle.store.reading.queries import Reader
from bridle.store.records import CallKind, CallStatus
from bridle.store.tree import common_prefix

pytestmark = pytest.mark.harness

POLICY = ShellPolicy(turns=3)
SOON_S = 60
WAITS_AND_REPEATS = {"opencode"}
"""The harnesses that repeat on any 429, whatever its error says, for a minute and more."""


class Recorded:
    """A session as the store holds it."""

    def __init__(self, session_id: str, reader: Reader) -> None:
        self.reader = reader
        self.session = reader.session(session_id)
        self.calls = sorted(reader.calls(session_id), key=lambda call: call.started_at)


@dataclass(frozen=True)
class Bench:
    """A real proxy in front of a scripted engine."""

    url: str
    reader: Reader


Script = Callable[[ScriptedRequest], ScriptedReply | str]
Stage = Callable[..., Bench]


@pytest.fixture(scope="module")
def stripping_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a template that strips thinking and writes arguments its own way."""
    directory = tmp_path_factory.mktemp("stripping-model")
    train_bench_tokenizer(directory)
    return directory


@pytest.fixture
def stage(stripping_model: Path, tmp_path: Path) -> Iterator[Stage]:
    with ExitStack() as stack:

        def start(script: Script, model: Path = stripping_model) -> Bench:
            engine = stack.enter_context(ScriptedEngine(model, script, max_model_len=1_000_000))
            store = str(tmp_path / "bridle.db")
            settings = ProxySettings(engine.base_url, store, tokenizer_dir=model)
            server = stack.enter_context(ProxyServer(settings))
            return Bench(server.base_url, stack.enter_context(Reader(store)))

        yield start


async def perform(
    bench: Bench,
    directory: Path,
    adapter: Adapter,
    task: Task,
    verifier: Verifier,
    sandbox: SandboxProvider,
) -> tuple[RolloutResult, Recorded]:
    """One completed rollout of ``task``, and what was recorded of it."""
    settings = RolloutSettings(directory, timeout_s=120, retries=0)
    async with Client(bench.url) as client:
        rollout = Rollout(client, adapter, LocalFleet(sandbox, verifier), settings)
        (result,) = await rollout.collect([Job(task)])
    await sandbox.close()
    assert result.outcome is Outcome.COMPLETED, logs_of(settings, result)
    assert result.session_id is not None
    return result, Recorded(result.session_id, bench.reader)


def logs_of(settings: RolloutSettings, result: RolloutResult) -> str:
    logs = settings.directory / str(result.session_id) / "logs"
    texts = [path.read_text()[-3000:] for path in sorted(logs.glob("std*.log"))]
    return "\n".join([result.outcome, result.error, *texts])


def assert_token_faithful(recorded: Recorded) -> None:
    """Ids as many as usage says, a logprob for each, and the engine's own prompt ids."""
    for call in recorded.calls:
        assert call.status is CallStatus.COMPLETE, call.reason
        prompt = recorded.reader.prompt_token_ids(call.id)
        (sampled,) = recorded.reader.sampled(call.id)
        assert prompt is not None
        assert len(prompt) == call.usage["prompt_tokens"]
        assert len(sampled.token_ids) == len(sampled.logprobs) == call.usage["completion_tokens"]
        assert len(sampled.token_ids) > 0


def assert_one_lineage(recorded: Recorded) -> None:
    """Each turn of the agent continues the one before it, in meaning and in tokens."""
    main = [call for call in with_kinds(recorded.calls) if call.kind is CallKind.MAIN]
    assert len(main) >= 3
    for parent, child in pairwise(main):
        assert child.parent_call_id == parent.id
        assert child.lineage_rule == "minted_id"
        assert child.break_reason is None
        before = recorded.reader.prompt_token_ids(parent.id)
        (sampled,) = recorded.reader.sampled(parent.id)
        now = recorded.reader.prompt_token_ids(child.id)
        assert before is not None
        assert now is not None
        path = [*before, *sampled.token_ids]
        assert list(now[: len(path)]) == path


def assert_thinks_and_calls_in_parallel(recorded: Recorded) -> None:
    """The work's turns were sampled with reasoning and two calls each, then there is an answer."""
    messages = [c.replies[0] for c in with_kinds(recorded.calls) if c.kind is CallKind.MAIN]
    assert all(message.reasoning for message in messages)
    called = [len(message.tool_calls) for message in messages]
    assert called[: POLICY.turns] == [PARALLEL] * POLICY.turns


def assert_clean(recorded: Recorded, branches: int = 1) -> None:
    """So many branches to train on, in a record whose audit finds nothing."""
    audited = audit_session(recorded.reader, recorded.session.id, bodies=True)
    assert audited.violations == ()
    assert audited.clean
    assert audited.samples == branches


@pytest.mark.parametrize("layer", LAYER_OF.values(), ids=lambda layer: layer.name)
def test_what_a_layer_is_built_of_holds_its_harness(layer: Layer, tmp_path: Path) -> None:
    layer.write_context(tmp_path)
    if layer.command:
        assert (tmp_path / "node_modules/.bin" / layer.command).exists()
        assert (tmp_path / "node").is_file()


@pytest.mark.parametrize("harness", ["claude-code", "qwen-code"])
async def test_sessions_share_most_of_their_prompts(
    stage: Stage, tmp_path: Path, harness: str
) -> None:
    """The difference between sessions, their workspace's path, stands near the end."""
    bench, adapter = stage(POLICY), CASES[harness].adapter()
    prompts = []
    for place in ("one", "another"):
        task = POLICY.task(harness)
        _, recorded = await perform(
            bench, tmp_path / place, adapter, task, WorkedThrough(), ProcessProvider()
        )
        main = [call for call in with_kinds(recorded.calls) if call.kind is CallKind.MAIN]
        prompt = recorded.reader.prompt_token_ids(main[0].id)
        assert prompt is not None
        prompts.append(prompt)
    assert common_prefix(*prompts) > 0.7 * min(len(prompt) for prompt in prompts)


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
async def test_an_installed_harness_works_three_turns_of_parallel_calls_and_is_recorded_whole(
    stage: Stage, tmp_path: Path, case: HarnessCase
) -> None:
    adapter = case.adapter()

    result, recorded = await perform(
        stage(POLICY), tmp_path, adapter, POLICY.task(case.name), WorkedThrough(), ProcessProvider()
    )

    assert result.scores == {"reward": 1.0}, result
    assert (recorded.session.harness, recorded.session.outcome) == (adapter.name, "completed")
    assert {call.dialect for call in recorded.calls} == {case.dialect}
    assert all(call.stream is case.streams for call in recorded.calls)
    assert_token_faithful(recorded)
    assert_one_lineage(recorded)
    assert_thinks_and_calls_in_parallel(recorded)
    assert_clean(recorded)


@pytest.mark.parametrize("name", sorted(set(CASES) - WAITS_AND_REPEATS))
async def test_an_installed_harness_ends_soon_when_its_budget_is_spent(
    stage: Stage, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    bench = stage(POLICY)
    settings = RolloutSettings(
        tmp_path, timeout_s=120, retries=0, session_settings={"budget": {"calls": POLICY.turns}}
    )

    async with Client(bench.url) as client:
        rollout = Rollout(
            client, case.adapter(), LocalFleet(ProcessProvider(), WorkedThrough()), settings
        )
        (result,) = await rollout.collect([Job(POLICY.task(case.name))])

    assert result.outcome in (Outcome.COMPLETED, Outcome.AGENT_ERROR), logs_of(settings, result)
    assert result.seconds < SOON_S
    assert result.session_id is not None
    calls = Recorded(result.session_id, bench.reader).calls
    assert [c.status for c in calls].count(CallStatus.COMPLETE) == POLICY.turns
    assert {c.reason for c in calls if c.status is not CallStatus.COMPLETE} == {"budget"}


TASKS = ("Count the words of the first list.", "Count the words of the second list.")
DELEGATING: dict[str, tuple[str, Callable[[str], dict[str, str]]]] = {
    "claude-code": (
        "Agent",
        lambda task: {
            "description": "Counts words",
            "prompt": task,
            "subagent_type": "general-purpose",
        },
    ),
    "qwen-code": (
        "agent",
        lambda task: {
            "description": "Counts words",
            "prompt": task,
            "subagent_type": "general-purpose",
        },
    ),
    "opencode": (
        "task",
        lambda task: {"description": "Counts words", "prompt": task, "subagent_type": "general"},
    ),
    "gemini-cli": ("invoke_agent", lambda task: {"agent_name": "generalist", "prompt": task}),
    "codex": ("multi_agent_v1__spawn_agent", lambda task: {"message": task}),
}
"""Each harness's tool that starts a sub-agent, and its arguments."""


def delegating_script(harness: str) -> Script:
    """Hands two tasks to sub-agents at once; each runs a command, then answers."""
    tool, arguments = DELEGATING[harness]

    def script(request: ScriptedRequest) -> ScriptedReply:
        names = {described["function"]["name"] for described in request.tools}
        said = [str(m["content"]) for m in request.messages if m["role"] == "user"]
        outputs = [str(m["content"]) for m in request.messages if m["role"] == "tool"]
        shell = next((name for name in SHELLS if name in names), None)
        if shell is None:
            return ScriptedReply("A title")
        if any(task in text for task in TASKS for text in said):
            if outputs:
                return ScriptedReply("There are 3 words.", reasoning="That is all of them.")
            call = ScriptedCall(shell, SHELLS[shell]("echo 3"))
            return ScriptedReply(reasoning="I count.", tool_calls=(call,))
        if not outputs:
            calls = tuple(ScriptedCall(tool, arguments(task)) for task in TASKS)
            return ScriptedReply(reasoning="Others count.", tool_calls=calls)
        if harness == "codex" and len(outputs) < 2 * len(TASKS):
            # It does not wait for its sub-agents by itself.
            agent = json.loads(outputs[len(outputs) - len(TASKS)])["agent_id"]
            wait = ScriptedCall("multi_agent_v1__wait_agent", {"targets": [agent]})
            return ScriptedReply(reasoning="I wait.", tool_calls=(wait,))
        return ScriptedReply("Both have 3 words.", reasoning="They agree.")

    return script


@pytest.mark.parametrize("name", sorted(DELEGATING))
async def test_sub_agents_that_work_at_once_are_lines_of_their_own_beside_the_main_one(
    stage: Stage, tmp_path: Path, name: str
) -> None:
    task = Task("delegate", "Delegate the counting of both lists.")
    case = CASES[name]

    _, recorded = await perform(
        stage(delegating_script(name)),
        tmp_path,
        case.adapter(),
        task,
        RegexAnswer("3 words"),
        ProcessProvider(),
    )

    assert_token_faithful(recorded)
    calls = with_kinds(recorded.calls)
    assert {call.kind for call in calls} - {CallKind.SIDE} == {CallKind.MAIN, CallKind.SUBAGENT}
    for kind, lines in ((CallKind.MAIN, 1), (CallKind.SUBAGENT, len(TASKS))):
        of_kind = {call.id: call for call in calls if call.kind is kind}
        roots = [call for call in of_kind.values() if call.parent_call_id is None]
        assert len(roots) == lines
        assert len(of_kind) > lines
        assert all(c.parent_call_id in of_kind for c in of_kind.values() if c not in roots)
    assert not any(call.break_reason for call in calls)
    assert_clean(recorded, branches=1 + len(TASKS))


@pytest.mark.parametrize("sandbox", [ProcessProvider, ForkedProvider])
@pytest.mark.parametrize("streaming", [True, False])
async def test_a_langchain_agent_completes_two_tool_calls_and_is_recorded_whole(
    stage: Stage, tmp_path: Path, shop: Any, sandbox: type[SandboxProvider], streaming: bool
) -> None:
    (task,) = shop.tasks("held_out", 1)
    steps = task.payload["steps"]

    def script(request: ScriptedRequest) -> ScriptedReply:
        done = sum(message["role"] == "tool" for message in request.messages)
        if done < len(steps):
            return ScriptedReply(
                tool_calls=(ScriptedCall(steps[done]["tool"], steps[done]["arguments"]),)
            )
        return ScriptedReply(f"It is {request.messages[-1]['content']}.")

    agent = PythonAgent(shop.script, arguments=["--stream"] if streaming else [], name="langchain")
    result, recorded = await perform(
        stage(script), tmp_path, agent, task, NumberAnswer(), sandbox()
    )

    assert result.scores == {"reward": 1.0}
    assert all(call.stream is streaming for call in recorded.calls)
    assert_token_faithful(recorded)
    assert_one_lineage(recorded)


async def test_mini_swe_agent_forked_from_a_warm_litellm_is_recorded_whole(
    stage: Stage, tmp_path: Path
) -> None:
    adapter, sandbox = agent("mini-swe-agent")
    assert isinstance(sandbox, ForkedProvider)
    (task,) = editing.tasks("train", 1)

    result, recorded = await perform(
        stage(editing.teacher([task], skill=1.0)),
        tmp_path,
        adapter,
        task,
        CommandVerifier(timeout_s=30),
        sandbox,
    )

    assert result.scores == {"reward": 1.0}
    assert_token_faithful(recorded)
    first, second = recorded.calls
    assert (second.parent_call_id, second.break_reason) == (first.id, None)


WRAPPED = {
    "codex": (
        'codex exec -m policy -c openai_base_url="$OPENAI_BASE_URL" --skip-git-repo-check '
        '--dangerously-bypass-approvals-and-sandbox "$PROMPT" </dev/null'
    ),
    "claude-code": 'IS_SANDBOX=1 claude -p "$PROMPT" --dangerously-skip-permissions </dev/null',
}
"""The commands that a person types after ``bridle run -- sh -c``.

Only Codex needs to be told its base URL.
"""


@pytest.mark.parametrize("name", sorted(WRAPPED))
async def test_a_wrapped_coding_harness_is_recorded_as_one_session(
    stage: Stage, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = stage(POLICY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", search_path(os.environ["PATH"]))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PROMPT", POLICY.task(name).prompt)
    for variable in ("CODEX_HOME", "CLAUDE_CONFIG_DIR"):
        monkeypatch.delenv(variable, raising=False)

    async with Client(bench.url) as client:
        session = await client.create_session(SessionRequest(harness=name))
        code = run_command(["sh", "-c", WRAPPED[name]], session_variables(session))
        assert await seal_session(client, session, code) == ""

    assert code == 0
    assert (tmp_path / "b.txt").read_text().split() == ["1b", "2b", "3b"]
    recorded = Recorded(session.id, bench.reader)
    assert_token_faithful(recorded)
    assert_one_lineage(recorded)
