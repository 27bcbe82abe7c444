"""Options that cannot be meant are refused in a line, before anything starts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import pytest
from click.testing import Result

from bridle.harnesses.install import NotLaunchable
from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.run.services import ServiceFailed
from bridle.trainer.learner.checkpoint import CheckpointError
from bridle.trainer.publish.swap import PublishError

pytestmark = pytest.mark.usefixtures("warm_start")

Bridle = Callable[..., Result]

TRAIN = ("train", "--policy", ".", "--agent", "codex", "--tasks", "t.jsonl", "--verifier", "exact")
SERVED = (*TRAIN, "--engine-url", "http://e")
ROLLOUT = ("rollout", "--agent", "codex", "--tasks", "t.jsonl", "--verifier", "exact")
SFT = ("sft", "--policy", ".")


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        (SFT, "--policy", "nowhere"),
        (("demo",), "--steps", -1),
        (("reproduce",), "--steps", 0),
        (SFT, "--data", "nowhere.parquet"),
        (("proxy", "--upstream", "http://e"), "--port", 70_000),
    ],
)
def test_a_value_out_of_range_is_refused(
    bridle: Bridle, tmp_path: Path, command: tuple[str, ...], option: str, value: object
) -> None:
    out = tmp_path / "out"
    asked = [*command, option, value]
    if command[0] in ("sft", "demo", "reproduce"):
        asked += ["--out", out]
    refused = bridle(*asked)
    assert refused.exit_code == 2
    assert f"Invalid value for '{option}'" in refused.stderr
    assert not out.exists()


@pytest.mark.parametrize(
    ("command", "setting", "value"),
    [
        *((TRAIN, name, 0) for name in ("groups.per_step", "groups.size", "agent.parallel")),
        *((TRAIN, f"training.{name}", 0) for name in ("steps", "minibatches")),
        *((TRAIN, f"training.{name}", -1) for name in ("max_staleness", "seed", "lora.rank")),
        *((TRAIN, f"training.{name}", -1) for name in ("optimizer.learning_rate", "seconds")),
        (TRAIN, "agent.timeout_s", 0),
        *((ROLLOUT, name, 0) for name in ("agent.parallel", "limit", "agent.timeout_s")),
        (("demo",), "eval_tasks", -1),
        *((("reproduce",), name, 0) for name in ("groups", "group_size", "teacher_sessions")),
        *((("reproduce",), name, 0) for name in ("eval_tasks", "parallel")),
        *((command, "minutes", -1) for command in (("demo",), ("reproduce",))),
        (("demo",), "learning_rate", -1),
        *((SFT, name, 0) for name in ("epochs", "batch_size")),
        *((SFT, name, -1) for name in ("seed", "lora.rank", "optimizer.learning_rate")),
    ],
)
def test_a_setting_out_of_range_is_refused(
    bridle: Bridle, tmp_path: Path, command: tuple[str, ...], setting: str, value: int
) -> None:
    out = tmp_path / "out"
    where = () if command is ROLLOUT else ("--out", out)
    refused = bridle(*command, "--set", f"{setting}={value}", *where)
    assert refused.exit_code == 2
    assert refused.stderr.startswith(f"bridle: the settings: {setting}: Expected")
    assert not out.exists()


def test_a_model_that_is_not_there_is_refused(bridle: Bridle, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"id": "1", "prompt": "What?", "payload": {}}\n')
    work = ("--agent", "echo {prompt}", "--tasks", tmp_path / "t.jsonl", "--out", tmp_path / "out")
    refused = bridle("train", *work, "--policy", "nowhere")
    assert refused.exit_code == 2
    assert "nowhere" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("url", ["127.0.0.1:18001", "", "ftp://x", "http://", "http://h:port"])
@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("proxy",), "--engine"),
        (("doctor",), "--upstream"),
        (("status",), "--proxy"),
        (("engine", "vllm"), "--url"),
        (TRAIN, "--engine-url"),
    ],
)
def test_an_address_that_is_no_url_is_refused_in_a_line(
    bridle: Bridle, tmp_path: Path, command: tuple[str, ...], option: str, url: str
) -> None:
    more = ["--out", tmp_path] if command[0] == "train" else []
    where = ["--store", tmp_path / "bridle.db"] if command[0] in ("proxy", "doctor") else []
    refused = bridle(*command, option, url, *where, *more)
    assert refused.exit_code == 2
    assert refused.stderr.startswith(f"bridle: {option}")
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize("setting", ["policies.judge={}", "other_models.judge={{urls={}}}"])
def test_an_address_of_a_further_model_is_a_url(
    bridle: Bridle, tmp_path: Path, setting: str
) -> None:
    assignment = setting.format('["ftp://x"]')
    where = ["--store", tmp_path / "bridle.db", "--set", assignment]
    refused = bridle("proxy", "--engine", "http://e", *where)
    assert refused.exit_code == 2
    name = assignment.partition("=")[0]
    assert refused.stderr.startswith(f"bridle: {name}: 'ftp://x' is not a URL")
    assert refused.stderr.count("\n") == 1


def test_an_address_of_a_running_proxy_is_a_url(bridle: Bridle, tmp_path: Path) -> None:
    refused = bridle(*SERVED, "--proxy-url", "ftp://x", "--out", tmp_path)
    assert refused.exit_code == 2
    assert refused.stderr.startswith("bridle: --proxy-url 'ftp://x' is not a URL")


@pytest.mark.parametrize(
    "error",
    [
        ServiceFailed("the engine did not start"),
        NotLaunchable("cannot start agent"),
        PublishError("no engine serves version 4", gap=None),
        CheckpointError("it does not fit this model"),
    ],
)
def test_why_training_ended_is_said_in_a_line(
    bridle: Bridle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    error.add_note("the same command resumes")

    def ended(*_: object, **__: object) -> NoReturn:
        raise error

    monkeypatch.setattr("bridle.run.local.stacks", ended)
    policy = tmp_path / "policy"
    size = train_tokenizer(policy, ["What is asked here?"] * 4, vocab_size=320)
    make_policy(policy, TinyShape(), vocab_size=size, seed=0)
    tasks = tmp_path / "t.jsonl"
    tasks.write_text('{"id": "1", "prompt": "What?", "payload": {}}\n')
    asked = ["--policy", policy, "--agent", "echo {prompt}", "--tasks", tasks]
    done = bridle("train", *asked, "--verifier", "exact", "--out", tmp_path / "out")
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert done.stderr == f"bridle: {error}; the same command resumes\n"


@pytest.mark.parametrize("command", [("sessions",), ("audit",), SERVED])
@pytest.mark.parametrize("scheme", ["", "sqlite:///"])
def test_a_store_that_is_not_there_is_said_and_not_made(
    bridle: Bridle, tmp_path: Path, command: tuple[str, ...], scheme: str
) -> None:
    path = tmp_path / "none.db"
    named = ["--store", f"{scheme}{path}"]
    if command == SERVED:
        named = ["--out", tmp_path / "out", "--set", f"services.store={scheme}{path}"]
    refused = bridle(*command, *named)
    assert refused.exit_code == 1
    assert "there is no store at" in refused.stderr
    assert not path.exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_port_that_is_taken_is_said_in_a_line(bridle: Bridle, store: str, workers: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        asked = ["--store", store, "--port", port, "--workers", workers]
        refused = bridle("proxy", "--upstream", "http://e", *asked)
    assert refused.exit_code == 1
    said = f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port\n"
    assert refused.stderr.endswith(said)


def test_a_proxy_that_cannot_start_says_so_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()

    def proxy(tokenizer: str) -> subprocess.CompletedProcess[str]:
        store = ("--store", str(tmp_path / "bridle.db"), "--port", "0")
        command = (sys.executable, "-m", "bridle", "proxy", "--upstream", "http://127.0.0.1:1")
        return subprocess.run(
            [*command, *store, "--tokenizer", str(tmp_path / tokenizer)],
            capture_output=True,
            text=True,
            check=False,
        )

    missing, empty = proxy("nowhere"), proxy("model")
    assert missing.returncode == 2
    assert "Invalid value for '--tokenizer'" in missing.stderr
    assert empty.returncode == 1
    assert f"bridle: no tokenizer in {tmp_path / 'model'}: " in empty.stderr


@pytest.mark.parametrize(
    ("command", "variable"),
    [
        (("proxy", "--upstream", "http://127.0.0.1:1"), "BRIDLE_ADMIN_KEY"),
        (("engine", "embedded", "--model", "."), "BRIDLE_ENGINE_API_KEY"),
    ],
)
def test_an_empty_key_is_none_where_others_reach_the_address(
    tmp_path: Path, command: tuple[str, ...], variable: str
) -> None:
    # As `export KEY=$(openssl rand -hex 32)` leaves it where there is no openssl.
    ended = subprocess.run(
        [sys.executable, "-m", "bridle", *command, "--host", "0.0.0.0", "--port", "0"],  # noqa: S104
        env={**os.environ, variable: "", "BRIDLE_STORE": str(tmp_path / "bridle.db")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode in (1, 2)
    assert f"0.0.0.0 is reachable by others: set {variable}" in ended.stderr


def test_a_short_key_is_refused_where_others_reach_the_address(
    bridle: Bridle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRIDLE_ADMIN_KEY", "k")
    where = ("--upstream", "http://127.0.0.1:1", "--host", "0.0.0.0", "--port", "0")  # noqa: S104
    refused = bridle("proxy", *where)
    assert refused.exit_code == 1
    assert "others, who could guess BRIDLE_ADMIN_KEY" in refused.stderr
    assert "openssl rand -hex 16" in refused.stderr


def test_it_tells_its_version(bridle: Bridle) -> None:
    assert bridle("--version").stdout == f"bridle {metadata.version('bridle-rl')}\n"
