"""The agents' pages of the documentation: their configuration is the adapters'.

Their commands run as they are typed, with ``bridle run`` and by hand.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import pytest

from bridle.engine.scripted import ScriptedEngine
from bridle.engine.stand_in import stand_in
from bridle.harnesses.adapters import ADAPTERS, PROGRAMS, Access
from bridle.harnesses.client import Session
from bridle.harnesses.install import find_python_harness, search_path
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.store.reading.queries import Reader
from bridle.store.records import CallStatus

PAGES = Path(__file__).parents[2] / "docs/agents"
AGENTS = sorted(page.stem for page in PAGES.glob("*.md"))
CODING = {name: ADAPTERS.get(name)() for name in PROGRAMS.values()}
SDKS = {"langchain": "langchain", "openai-agents": "agents_sdk"}
"""The example that each page of an SDK runs."""
PROXY = "http://127.0.0.1:8484"
QUESTION = "What is in this folder?"
_FILE = re.compile(r'^```\w+ title="~/([^"]+)"\n(.*?)^```', re.DOTALL | re.MULTILINE)
_CONSOLE = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)


def page(agent: str) -> str:
    return (PAGES / f"{agent}.md").read_text()


def recorded_command(agent: str) -> list[str]:
    """The words of the page's ``bridle run`` line."""
    (line,) = re.findall(r"^(bridle run -- .*)$", page(agent), re.MULTILINE)
    return shlex.split(line)


def by_hand(agent: str) -> tuple[dict[str, str], list[str]]:
    """The files that a person writes, below home, and the lines that they type."""
    text = page(agent).split("## By hand", 1)[1].split("## What is exact", 1)[0]
    (typed,) = _CONSOLE.findall(text)
    return dict(_FILE.findall(text)), typed.splitlines()


def exported(lines: list[str]) -> dict[str, str]:
    words = [shlex.split(line) for line in lines if line.startswith("export ")]
    return dict(word.split("=", 1) for line in words for word in line[1:])


def test_each_agent_that_bridle_run_knows_has_a_page() -> None:
    assert set(AGENTS) == {*CODING, *SDKS}


@pytest.mark.parametrize("agent", CODING)
def test_a_pages_configuration_is_what_the_adapter_writes(agent: str) -> None:
    home = PurePath("/home/me")
    urls = {"openai": f"{PROXY}/v1", "anthropic": PROXY, "google": PROXY}
    access = Access(Session(id="session_1", key="unused", base_urls=urls))
    made = CODING[agent].configuration(access, home)
    files, lines = by_hand(agent)
    # Claude Code's own file lies beside its folder, unless the folder is named by a variable.
    names = {PurePath(name).name: text for name, text in files.items()}
    for path, text in made.files.items():
        read: Any = tomllib.loads if path.suffix == ".toml" else json.loads
        assert read(names.pop(path.name)) == read(text)
    assert not names
    shown = exported(lines)
    of_places = {name for name, value in made.environment.items() if value.startswith(str(home))}
    assert shown == {n: value for n, value in made.environment.items() if n not in of_places}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    train_tokenizer(directory, [QUESTION] * 20, vocab_size=600)
    return directory


@pytest.fixture
def proxy(model_dir: Path, tmp_path: Path) -> Iterator[str]:
    store = str(tmp_path / "bridle.db")
    with (
        ScriptedEngine(model_dir, stand_in, max_model_len=1 << 20) as engine,
        ProxyServer(ProxySettings(engine.base_url, store, tokenizer_dir=model_dir)) as running,
    ):
        yield running.base_url


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with something in it and the examples of the pages, beside an empty home."""
    (tmp_path / "home").mkdir()
    folder = tmp_path / "work"
    (folder / "examples").mkdir(parents=True)
    (folder / "lamp.txt").write_text("a lamp\n")
    for name in SDKS.values():
        shutil.copytree(PAGES.parents[1] / "examples" / name, folder / "examples" / name)
    return folder


def program_path(agent: str) -> str:
    """Return the path of a page's commands: ``bridle``, the harness, and its Python."""
    places = [str(Path(sys.executable).parent)]
    if agent in ("openai-agents", "mini-swe-agent"):
        program = "python" if agent in SDKS else "mini"
        places.insert(0, str(Path(find_python_harness(agent, program)).parent))
    return search_path(os.pathsep.join([*places, os.environ["PATH"]]))


def typed(command: str, agent: str, work: Path, **environment: str) -> str:
    """Return the answer of a person's shell."""
    named = {name: value for name, value in os.environ.items() if "BRIDLE" not in name}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=work,
        env={
            **named,
            "PATH": program_path(agent),
            "HOME": str(work.parent / "home"),
            **environment,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    return done.stdout[-2000:] + done.stderr[-2000:]


def require_recorded(store: Path, answered: str, commands: int = 1) -> list[str | None]:
    """Each command is one session of complete calls with ids. Returns the sessions' harnesses."""
    with Reader(str(store)) as reader:
        sessions = list(reader.sessions())
        calls = [call for session in sessions for call in reader.calls(session.id)]
    assert len(sessions) == commands, answered
    assert calls, answered
    assert {call.status for call in calls} == {CallStatus.COMPLETE}, answered
    assert all(call.sampled_tokens for call in calls)
    return [session.harness for session in sessions]


@pytest.mark.harness
@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_is_recorded_by_the_pages_command(
    agent: str, proxy: str, work: Path, tmp_path: Path
) -> None:
    command = shlex.join(recorded_command(agent))
    answered = typed(command, agent, work, BRIDLE_PROXY=proxy, BRIDLE_HOME=str(tmp_path / "own"))
    (harness,) = require_recorded(tmp_path / "bridle.db", answered)
    if agent in CODING:
        assert harness == agent


@pytest.mark.harness
@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_is_recorded_with_the_pages_lines_alone(
    agent: str, proxy: str, work: Path, tmp_path: Path
) -> None:
    files, lines = by_hand(agent)
    for name, text in files.items():
        file = tmp_path / "home" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace(PROXY, proxy))
    answered = typed("\n".join(lines).replace(PROXY, proxy), agent, work)
    commands = sum(not line.startswith("export ") for line in lines)
    require_recorded(tmp_path / "bridle.db", answered, commands)
