"""``bridle run``: the command is untouched, and recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from click.testing import Result

from store.queries import Reader

AGENT = """
import os, sys
import openai
client = openai.OpenAI()
reply = client.chat.completions.create(
    model="gpt-x", messages=[{"role": "user", "content": sys.argv[1]}]
)
print(reply.choices[0].message.content)
sys.exit(3)
"""


def run(
    proxy_url: str, *command: str, options: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bridle", "run", "--proxy", proxy_url, *options, "--", *command],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        check=False,
    )


def test_output_and_exit_code_pass_through_and_the_session_is_recorded(
    bridle: Callable[..., Result], proxy_url: str, store: str
) -> None:
    done = run(proxy_url, sys.executable, "-c", AGENT, "Hello?")
    assert done.stdout == "The answer is unknown.\n"
    assert done.returncode == 3
    (row,) = json.loads(bridle("sessions", "--store", store, "--json").stdout)
    assert (row["calls"], row["outcome"]) == (1, "agent_error")
    assert row["id"] in done.stderr


def test_a_session_has_the_name_of_its_command_or_of_the_harness_in_it(
    proxy_url: str, store: str
) -> None:
    for options in ((), ("--harness", "codex")):
        assert run(proxy_url, "sh", "-c", "true", options=options).returncode == 0
    with Reader(store) as reader:
        assert [session.harness for session in reader.sessions()] == ["sh", "codex"]


def test_a_command_that_does_not_exist_says_so_and_leaves_no_session(
    proxy_url: str, store: str
) -> None:
    done = run(proxy_url, "no-such-program")
    assert done.returncode == 127
    assert "no-such-program" in done.stderr
    with Reader(store) as reader:
        assert not list(reader.sessions())


def test_a_command_that_cannot_be_started_leaves_a_session_of_infrastructure(
    proxy_url: str, store: str, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("no script and no program")
    broken.chmod(0o755)
    done = run(proxy_url, str(broken))
    assert done.returncode == 127
    assert done.stderr == f"bridle: cannot start {broken}: Exec format error\n"
    with Reader(store) as reader:
        assert [session.outcome for session in reader.sessions()] == ["infrastructure"]


def test_a_command_that_called_nothing_is_told_of_the_variables(proxy_url: str) -> None:
    done = run(proxy_url, sys.executable, "-c", "")
    assert "calls: none" in done.stderr
    for variable in ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "GOOGLE_GEMINI_BASE_URL"):
        assert variable in done.stderr


def test_without_a_proxy_nothing_runs() -> None:
    done = run("http://127.0.0.1:9", sys.executable, "-c", "print('ran')")
    assert done.returncode == 1
    assert "ran" not in done.stdout
    assert "bridle proxy" in done.stderr


def test_no_command_is_an_error(proxy_url: str) -> None:
    assert run(proxy_url).returncode == 2
