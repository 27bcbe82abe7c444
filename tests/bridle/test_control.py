"""Test the messages of commands when the proxy refuses them or does not answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result

from bridle.engine.scripted import ScriptedEngine, ScriptedReply
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings

Bridle = Callable[..., Result]


@pytest.fixture
def closed_proxy(model_dir: Path, store: str) -> Iterator[str]:
    """One that wants its admin key."""
    with (
        ScriptedEngine(
            model_dir, lambda _: ScriptedReply("Yes."), served_model_name="policy"
        ) as engine,
        ProxyServer(
            ProxySettings(
                engine.base_url,
                f"sqlite:///{store}",
                tokenizer_dir=model_dir,
                host="0.0.0.0",  # noqa: S104
                admin_key="secret",
            )
        ) as proxy,
    ):
        yield proxy.base_url


@pytest.fixture
def commands(tmp_path: Path) -> dict[str, list[object]]:
    """The arguments behind name and options, for commands that ask a running proxy."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"id": "t1", "prompt": "one", "payload": {"answer": "one"}}\n')
    agent: list[object] = ["--agent", "echo {prompt}", "--set", f"agent.directory={tmp_path / 's'}"]
    return {
        "status": [],
        "run": ["--", "true"],
        "rollout": [*agent, "--tasks", tasks, "--verifier", "exact"],
    }


@pytest.mark.parametrize("command", ["status", "run", "rollout"])
@pytest.mark.parametrize("key", [[], ["--key", "wrong"]])
def test_a_proxy_that_wants_its_key_is_said_in_a_line(
    bridle: Bridle,
    closed_proxy: str,
    commands: dict[str, list[object]],
    command: str,
    key: list[str],
) -> None:
    refused = bridle(command, "--proxy", closed_proxy, *key, *commands[command])
    assert refused.exit_code == 1
    last = refused.stderr.splitlines()[-1]
    assert "it requires its admin key; set BRIDLE_ADMIN_KEY or give --key" in last
    assert last.startswith("bridle: the proxy answered 40")
    assert "{" not in refused.stderr
    assert "running?" not in refused.stderr


@pytest.mark.parametrize("command", ["status", "run"])
def test_where_nothing_answers_it_is_asked_whether_a_proxy_runs(
    bridle: Bridle, commands: dict[str, list[object]], command: str
) -> None:
    refused = bridle(command, "--proxy", "http://127.0.0.1:9", *commands[command])
    assert refused.exit_code == 1
    assert refused.stderr.startswith("bridle: no answer from http://127.0.0.1:9")
    assert refused.stderr.endswith("Is `bridle proxy` running?\n")
