"""The installed harnesses, unmodified, each on a scripted two-tool task through the real proxy."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine.scripted import Reply, ScriptedCall, ScriptedEngine, ScriptedRequest
from harnesses.adapters import CODING_HARNESSES, PythonAgent
from harnesses.adapters.base import Adapter
from harnesses.client import ControlClient, SessionRequest
from harnesses.install import find_harness, search_path
from harnesses.rollout import Job, Outcome, Rollout, RolloutResult, Settings
from harnesses.run import run_command, seal_session, session_variables
from harnesses.runtimes import LocalRuntime, NotLaunchable, Runtime, WarmRuntime
from harnesses.tasks import Task
from harnesses.verifiers import Delivery, NumberAnswer, RegexAnswer, Scores, Verifier
from proxy.dialects.registry import DIALECTS as proxy_dialects
from proxy.server import ProxyServer
from proxy.settings import ProxySettings
from store.queries import CallRow, Reader
from store.records import CallStatus

pytestmark = pytest.mark.harness

NOTE = "apple pie"
SAID = f"The note says {NOTE}."
NOTE_TASK = Task(
    id="note-1",
    suite="notes",
    prompt=f"Write '{NOTE}' into note.txt, read it back, and say what it says.",
)
COMMANDS = (f"printf '{NOTE}' > note.txt", "cat note.txt")

SHELLS: dict[str, Callable[[str], dict[str, Any]]] = {
    "exec_command": lambda command: {"cmd": command},
    "Bash": lambda command: {"command": command, "description": "Runs a command"},
    "run_shell_command": lambda command: {
        "command": command,
        "description": "Runs a command",
        "is_background": False,
    },
    "bash": lambda command: {"command": command, "description": "Runs a command"},
}
"""Each harness's shell tool and its arguments."""


def note_script(request: ScriptedRequest) -> Reply:
    """Writes the note, reads it, and repeats what the tool really said."""
    names = {tool["function"]["name"] for tool in request.tools}
    shell = next((name for name in SHELLS if name in names), None)
    outputs = [str(message["content"]) for message in request.messages if message["role"] == "tool"]
    if shell is None:
        return Reply("A note")  # a side call, such as a title
    if len(outputs) < len(COMMANDS):
        return Reply(tool_calls=(ScriptedCall(shell, SHELLS[shell](COMMANDS[len(outputs)])),))
    if "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" in request.prompt_text:  # mini-swe-agent's way
        submit = f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo '{SAID}'"
        return Reply(tool_calls=(ScriptedCall(shell, {"command": submit}),))
    return Reply(SAID if NOTE in outputs[1] else f"It says {outputs[1]}.")


class WroteAndSaid:
    """1.0 when the note lies in the workspace and the answer repeats it."""

    async def __call__(self, delivery: Delivery) -> Scores:
        note = delivery.workspace / "note.txt"
        written = note.exists() and note.read_text() == NOTE
        said = await RegexAnswer(re.escape(NOTE))(delivery)
        return {"reward": float(written and said["reward"] == 1.0)}


class Recorded:
    """What the store holds of a session."""

    def __init__(self, session_id: str, reader: Reader) -> None:
        self.reader = reader
        self.session = reader.session(session_id)
        self.calls = sorted(reader.calls(session_id), key=lambda call: call.started_at)


@dataclass(frozen=True)
class Bench:
    """A real proxy in front of a scripted engine."""

    url: str
    reader: Reader


Script = Callable[[ScriptedRequest], Reply]
Stage = Callable[[Script], Bench]


@pytest.fixture
def stage(model_dir: Path, tmp_path: Path) -> Iterator[Stage]:
    with ExitStack() as stack:

        def start(script: Script) -> Bench:
            engine = stack.enter_context(ScriptedEngine(model_dir, script, max_model_len=1_000_000))
            store = str(tmp_path / "bridle.db")
            settings = ProxySettings(engine.base_url, store, tokenizer_dir=model_dir)
            server = stack.enter_context(ProxyServer(settings))
            return Bench(server.base_url, stack.enter_context(Reader(store)))

        yield start


async def perform(
    bench: Bench,
    directory: Path,
    adapter: Adapter,
    task: Task,
    verifier: Verifier,
    runtime: Runtime,
) -> tuple[RolloutResult, Recorded]:
    """One completed rollout of ``task``, and what was recorded of it."""
    settings = Settings(directory, timeout_s=120, retries=0)
    async with ControlClient(bench.url) as client:
        rollout = Rollout(client, adapter, runtime, verifier, settings)
        (result,) = await rollout.collect([Job(task)])
    await runtime.close()
    assert result.outcome is Outcome.COMPLETED, logs_of(settings, result)
    assert result.session_id is not None
    return result, Recorded(result.session_id, bench.reader)


def logs_of(settings: Settings, result: RolloutResult) -> str:
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


def assert_one_lineage(recorded: Recorded, turns: int) -> None:
    """Each turn of the agent continues the one before it, in meaning and in tokens."""
    main = [call for call in recorded.calls if call.parent_call_id or is_parent(recorded, call)]
    assert len(main) == turns
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


def is_parent(recorded: Recorded, call: CallRow) -> bool:
    return any(other.parent_call_id == call.id for other in recorded.calls)


REQUIRED = ("codex", "claude-code")


def dialect_of(name: str) -> str:
    special = {"codex": "responses", "claude-code": "messages", "gemini-cli": "google"}
    return special.get(name, "chat")


STREAMING = {name: name != "mini-swe-agent" for name in CODING_HARNESSES}


@pytest.mark.parametrize(
    "name", [name for name in CODING_HARNESSES if dialect_of(name) in proxy_dialects]
)
async def test_an_installed_coding_harness_completes_two_tool_calls_and_is_recorded_whole(
    stage: Stage, tmp_path: Path, name: str
) -> None:
    adapter = CODING_HARNESSES[name]()
    if name not in REQUIRED and not is_installed(name):
        pytest.skip(f"{name} is not installed (harnesses/node/install --all)")

    result, recorded = await perform(
        stage(note_script), tmp_path, adapter, NOTE_TASK, WroteAndSaid(), LocalRuntime()
    )

    assert (result.scores, result.answer) == ({"reward": 1.0}, SAID)
    assert (recorded.session.harness, recorded.session.outcome) == (name, "completed")
    assert {call.dialect for call in recorded.calls} == {dialect_of(name)}
    assert all(call.stream is STREAMING[name] for call in recorded.calls)
    assert_token_faithful(recorded)
    assert_one_lineage(recorded, turns=3)


@pytest.mark.parametrize("runtime", [LocalRuntime, WarmRuntime])
@pytest.mark.parametrize("streaming", [True, False])
async def test_a_langchain_agent_completes_two_tool_calls_and_is_recorded_whole(
    stage: Stage, tmp_path: Path, shop: Any, runtime: type[Runtime], streaming: bool
) -> None:
    (task,) = shop.tasks("held_out", 1)
    steps = task.payload["steps"]

    def script(request: ScriptedRequest) -> Reply:
        done = sum(message["role"] == "tool" for message in request.messages)
        if done < len(steps):
            return Reply(tool_calls=(ScriptedCall(steps[done]["tool"], steps[done]["arguments"]),))
        return Reply(f"It is {request.messages[-1]['content']}.")

    agent = PythonAgent(shop.script, arguments=["--stream"] if streaming else [], name="langchain")
    result, recorded = await perform(
        stage(script), tmp_path, agent, task, NumberAnswer(), runtime()
    )

    assert result.scores == {"reward": 1.0}
    assert all(call.stream is streaming for call in recorded.calls)
    assert_token_faithful(recorded)
    assert_one_lineage(recorded, turns=3)


WRAPPED = {
    "codex": (
        'codex exec -m policy -c openai_base_url="$OPENAI_BASE_URL" --skip-git-repo-check '
        '--dangerously-bypass-approvals-and-sandbox "$PROMPT" </dev/null'
    ),
    "claude-code": 'IS_SANDBOX=1 claude -p "$PROMPT" --dangerously-skip-permissions </dev/null',
}
"""What a person types after ``bridle run -- sh -c``; only Codex needs to be told its base URL."""


@pytest.mark.parametrize("name", sorted(WRAPPED))
async def test_a_wrapped_coding_harness_is_recorded_as_one_session(
    stage: Stage, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = stage(note_script)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", search_path(os.environ["PATH"]))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PROMPT", NOTE_TASK.prompt)
    for variable in ("CODEX_HOME", "CLAUDE_CONFIG_DIR"):
        monkeypatch.delenv(variable, raising=False)

    async with ControlClient(bench.url) as client:
        session = await client.create_session(SessionRequest(harness=name))
        code = run_command(["sh", "-c", WRAPPED[name]], session_variables(session))
        assert await seal_session(client, session, code) == ""

    assert code == 0
    assert (tmp_path / "note.txt").read_text() == NOTE
    recorded = Recorded(session.id, bench.reader)
    assert_token_faithful(recorded)
    assert_one_lineage(recorded, turns=3)


def is_installed(name: str) -> bool:
    if name == "mini-swe-agent":
        return shutil.which("mini") is not None
    try:
        find_harness({"qwen-code": "qwen", "gemini-cli": "gemini"}.get(name, name))
    except NotLaunchable:
        return False
    return True
