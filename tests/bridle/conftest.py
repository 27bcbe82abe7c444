"""The ``bridle`` program against a proxy in front of a scripted engine."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.support.processes import until
from typer.testing import CliRunner, Result

from bridle.cli.program import app
from bridle.engine.scripted import ScriptedCall, ScriptedEngine, ScriptedReply, ScriptedRequest
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.store.schema.database import migrate

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "a plus b",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}


@pytest.fixture(autouse=True)
def no_key_of_another_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`bridle proxy` makes a key that other commands of the same data folder find."""
    monkeypatch.setenv("BRIDLE_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="session", autouse=True)
def hang_ups_are_heard() -> None:
    """Under ``nohup`` commands would inherit that they ignore them; a handler is not inherited."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)


def adds_then_answers(request: ScriptedRequest) -> ScriptedReply:
    """Calls ``add`` once, then says what it gave."""
    results = [m["content"] for m in request.messages if m["role"] == "tool"]
    if request.tools and not results:
        return ScriptedReply(tool_calls=(ScriptedCall("add", {"a": 2, "b": 3}),))
    return ScriptedReply(f"The answer is {results[-1] if results else 'unknown'}.")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a chat template; a scripted engine needs no weights."""
    directory = tmp_path_factory.mktemp("model")
    texts = ["What is 2 plus 3? The answer is 5.", json.dumps(TOOL)] * 20
    train_tokenizer(directory, texts, vocab_size=600)
    return directory


@pytest.fixture
def store(tmp_path: Path) -> str:
    path = str(tmp_path / "bridle.db")
    migrate(path)
    return path


@pytest.fixture
def proxy_url(model_dir: Path, store: str) -> Iterator[str]:
    with (
        ScriptedEngine(model_dir, adds_then_answers, served_model_name="policy") as engine,
        ProxyServer(
            ProxySettings(engine.base_url, f"sqlite:///{store}", tokenizer_dir=model_dir)
        ) as proxy,
    ):
        yield proxy.base_url


@pytest.fixture
def recorded(proxy_url: str) -> str:
    """One recorded session of two turns, by name."""
    client = openai.OpenAI(base_url=f"{proxy_url}/s/lamps/v1", api_key="none")
    messages: list[Any] = [{"role": "user", "content": "What is 2 plus 3?"}]
    asked = client.chat.completions.create(model="gpt-x", messages=messages, tools=[TOOL])  # type: ignore[list-item]
    reply = asked.choices[0].message
    assert reply.tool_calls
    messages += [
        reply.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "5"},
    ]
    client.chat.completions.create(model="gpt-x", messages=messages, tools=[TOOL])  # type: ignore[list-item]
    return "lamps"


@pytest.fixture
def bridle() -> Callable[..., Result]:
    """Runs ``bridle ARGUMENTS`` in this process."""

    def call(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return call


@pytest.fixture(name="until")
def waits_for_a_condition() -> Callable[[Callable[[], bool]], None]:
    return until


TRAINED_AGENT = """
import json, os, sys, urllib.request

body = {"model": "policy", "max_tokens": 4, "messages": [{"role": "user", "content": sys.argv[1]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""
TRAINING_VERIFIER = """
async def check(delivery):
    return {"reward": float(sum(map(ord, delivery.answer)) % 2)}
"""


@pytest.fixture
def training_arguments(tmp_path: Path) -> Callable[..., list[str]]:
    """Makes the arguments of a ``bridle train`` on four tasks with a tiny policy.

    ``before_the_call``: Python that each session's agent runs first.
    """

    def make(before_the_call: str = "") -> list[str]:
        policy = tmp_path / "policy"
        size = train_tokenizer(
            policy, ["Which number is question one? 0123456789"] * 4, vocab_size=320
        )
        shape = TinyShape(hidden=32, layers=1, heads=1, kv_heads=1, intermediate=64, context=512)
        make_policy(policy, shape, vocab_size=size, seed=3)
        (tmp_path / "agent.py").write_text(before_the_call + TRAINED_AGENT)
        (tmp_path / "verifier.py").write_text(TRAINING_VERIFIER)
        lines = [{"id": f"t{n}", "prompt": f"Question {n}?", "payload": {}} for n in range(4)]
        (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        agent = f"{sys.executable} {tmp_path / 'agent.py'} {{prompt}}"
        return [
            *("train", "--policy", str(policy), "--agent", agent),
            *("--tasks", str(tmp_path / "tasks.jsonl")),
            *("--verifier", f"{tmp_path / 'verifier.py'}:check"),
            *("--out", str(tmp_path / "out")),
            *("--set", "groups.per_step=2", "--set", "groups.size=6", "--set", "agent.parallel=6"),
            *("--set", "training.optimizer.learning_rate=0.001"),
        ]

    return make
