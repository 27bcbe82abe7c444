"""``bridle run``: the command is untouched, and recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from click.testing import Result
from typer.testing import CliRunner

from bridle.cli.program import app
from bridle.store.reading.queries import Reader

pytestmark = pytest.mark.usefixtures("warm_start")

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
    with Reader(store) as reader:
        session = reader.session(row["id"])
    assert session.argv == (sys.executable, "-c", AGENT, "Hello?")
    assert (session.folder, session.home) == (os.getcwd(), os.environ.get("HOME"))
    assert set(session.environment_names or ()) >= {"HOME", "PATH"} & set(os.environ)


def test_temperature_0_is_reported_with_the_option_that_pins_it(proxy_url: str, store: str) -> None:
    greedy = AGENT.replace('model="gpt-x"', 'model="gpt-x", temperature=0')
    done = run(proxy_url, sys.executable, "-c", greedy, "Hello?")
    assert "temperature 0" in done.stderr
    assert "bridle run --sampling policy" in done.stderr
    pinned = run(
        proxy_url, sys.executable, "-c", greedy, "Hello?", options=["--sampling", "policy"]
    )
    assert "temperature 0" not in pinned.stderr
    with Reader(store) as reader:
        calls = [call for one in reader.sessions() for call in reader.calls(one.id)]
    assert sorted(call.sampler.temperature for call in calls) == [0.0, 1.0]


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


@pytest.mark.parametrize(
    ("arguments", "inside", "hinted"),
    [
        (["exec", "hi"], False, True),
        (["exec", "-C", "elsewhere", "hi"], True, True),
        (["exec", "hi"], True, False),
        (["exec", "--skip-git-repo-check", "hi"], False, False),
        (["login"], False, False),
    ],
)
def test_codex_outside_a_git_repository_is_named(
    bridle: Callable[..., Result],
    proxy_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    inside: bool,
    hinted: bool,
) -> None:
    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    if inside:
        (folder / ".git").mkdir()
    codex = tmp_path / "bin" / "codex"
    codex.parent.mkdir()
    codex.write_text("#!/bin/sh\nexit 1\n")
    codex.chmod(0o755)
    monkeypatch.setenv("PATH", f"{codex.parent}:{os.environ['PATH']}")
    monkeypatch.chdir(folder / "below")
    asked = [str(tmp_path / one) if one == "elsewhere" else one for one in arguments]
    done = bridle("run", "--proxy", proxy_url, "--", "codex", *asked)
    assert done.exit_code == 1
    assert "calls: none" in done.stderr
    assert ("Git repository" in done.stderr) == hinted


def test_without_a_proxy_nothing_runs() -> None:
    done = run("http://127.0.0.1:9", sys.executable, "-c", "print('ran')")
    assert done.returncode == 1
    assert "ran" not in done.stdout
    assert "bridle proxy" in done.stderr


def test_no_command_is_an_error(proxy_url: str) -> None:
    assert run(proxy_url).returncode == 2


class _Server(BaseHTTPRequestHandler):
    """Any web server; with ``opens`` one that can open and seal a session, and no more."""

    opens: ClassVar[bool] = False

    def do_POST(self) -> None:
        self._say({"id": "ses_x", "key": "k", "base_urls": {}} if self.opens else "welcome")

    def do_GET(self) -> None:
        self._say("welcome")

    def _say(self, told: object) -> None:
        body = json.dumps(told).encode()
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class _Opening(_Server):
    opens = True


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def test_a_web_server_that_is_no_proxy_is_said_in_a_line() -> None:
    with serving(_Server) as url:
        done = run(url, "sh", "-c", "true")
    assert done.returncode == 1
    assert done.stderr.startswith("bridle: the proxy answered 200: not as Bridle does")
    assert "running?" not in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_count_that_fails_does_not_replace_the_commands_exit_code() -> None:
    with serving(_Opening) as url:
        done = run(url, "sh", "-c", "exit 7")
    assert done.returncode == 7
    assert "recorded session ses_x; its calls cannot be counted" in done.stderr


@pytest.fixture
def codex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name that prints its configuration, and calls nothing."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "codex"
    program.write_text(
        '#!/bin/sh\ncat "$CODEX_HOME/config.toml"; echo "$HOME" "$CODEX_HOME" "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return program


def test_a_known_harness_gets_a_configuration_of_its_own_and_keeps_the_persons_home(
    proxy_url: str, store: str, codex: Path
) -> None:
    done = run(proxy_url, "codex", "exec", "What is here?")
    *config, last = done.stdout.splitlines()
    assert any(line.startswith(f'base_url = "{proxy_url}/s/ses_') for line in config)
    home, configured, *arguments = last.split(" ", 2)
    assert home == os.environ["HOME"]
    assert arguments == ["exec What is here?"]
    assert not Path(configured).exists(), "it is gone with the session"
    assert "codex was configured for this session" in done.stderr
    assert "use --intercept" in done.stderr
    with Reader(store) as reader:
        assert [session.harness for session in reader.sessions()] == ["codex"]


def test_a_harness_keeps_its_own_configuration_when_that_is_asked_for(
    proxy_url: str, codex: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.toml").write_text("mine = true\n")
    monkeypatch.setenv("CODEX_HOME", str(tmp_path))
    done = run(proxy_url, "codex", options=("--no-configure",))
    assert done.stdout.startswith("mine = true\n")
    assert "--no-configure leaves its own settings in place" in done.stderr


def test_a_harness_that_is_not_installed_is_told_with_what_installs_it(
    proxy_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("bridle.harnesses.install.BIN_DIRECTORIES", ())
    refused = CliRunner().invoke(app, ["run", "--proxy", proxy_url, "--", "qwen", "-p", "hi"])
    assert refused.exit_code == 127
    assert "qwen is not installed" in refused.stderr
    assert "`npm install -g @qwen-code/qwen-code`" in refused.stderr
