"""The first hour: what a person who knows nothing of Bridle types, and what is answered."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import Result

import bridle as face
from bridle.engine.scripted import ScriptedEngine, ScriptedReply
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.run.hub import model_directory, tokenizer_directory

Bridle = Callable[..., Result]


@pytest.fixture
def engine_url(model_dir: Path) -> Iterator[str]:
    with ScriptedEngine(model_dir, lambda _: ScriptedReply("four")) as engine:
        yield engine.base_url


@pytest.fixture
def gone(store: str) -> Iterator[str]:
    """A proxy whose engine does not listen."""
    settings = ProxySettings("http://127.0.0.1:9", f"sqlite:///{store}")
    with ProxyServer(settings) as proxy:
        yield proxy.base_url


def test_the_proxy_s_own_address_says_what_is_there(proxy_url: str) -> None:
    reply = httpx.get(proxy_url, trust_env=False)
    assert reply.status_code == 200
    assert "bridle viewer" in reply.text
    assert httpx.head(proxy_url, trust_env=False).status_code == 200


def test_a_proxy_named_with_the_v1_of_its_clients_is_found(bridle: Bridle, proxy_url: str) -> None:
    result = bridle("status", "--proxy", f"{proxy_url}/v1")
    assert result.exit_code == 0, result.output
    assert "policy version 0" in result.output


def test_an_engine_named_as_the_proxy_is_named_in_the_error(
    bridle: Bridle, engine_url: str
) -> None:
    result = bridle("status", "--proxy", engine_url)
    assert result.exit_code == 1
    assert f"{engine_url} is no Bridle proxy" in " ".join(result.output.split())


def test_doctor_without_arguments_examines_what_is_here(
    bridle: Bridle, proxy_url: str, store: str
) -> None:
    result = bridle("doctor", "--proxy", proxy_url, "--store", store)
    assert result.exit_code == 0, result.output
    for part in ("proxy", "store", "harnesses", "versions"):
        assert f"ok      {part}\n" in result.output
    assert f"{proxy_url} is ready; circuits of its engines: closed" in result.output


def test_doctor_without_a_proxy_says_how_to_start_one(bridle: Bridle, store: str) -> None:
    result = bridle("doctor", "--proxy", "http://127.0.0.1:9", "--store", store)
    assert result.exit_code == 0, result.output
    assert "start it with `bridle proxy --engine URL`" in result.output


def test_doctor_refuses_an_engine_as_the_proxy(bridle: Bridle, engine_url: str, store: str) -> None:
    result = bridle("doctor", "--proxy", engine_url, "--store", store)
    assert result.exit_code == 1
    assert f"{engine_url} is no Bridle proxy" in result.output


def test_a_proxy_whose_engine_is_gone_is_broken_with_the_remedy(
    bridle: Bridle, gone: str, store: str
) -> None:
    result = bridle("doctor", "--proxy", gone, "--store", store)
    assert result.exit_code == 1
    assert "start its engine" in result.output


def test_the_default_store_needs_no_name(
    proxy_url: str, recorded: str, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRIDLE_STORE", store)
    with face.open_store() as opened:
        assert [session.record.name for session in opened.sessions()] == [recorded]


def test_a_short_name_is_a_policy_wherever_one_is_asked_for(
    bridle: Bridle, store: str, tmp_path: Path
) -> None:
    examined = bridle("doctor", "--model", "tiny", "--store", store)
    assert examined.exit_code == 0, examined.output
    assert model_directory("tiny") == tokenizer_directory("tiny")
    refused = bridle("doctor", "--model", "tinny", "--store", store)
    assert refused.exit_code == 2
    assert "smollm2, tiny" in " ".join(refused.output.replace("│", " ").split())


def test_a_starter_is_written_once(bridle: Bridle, tmp_path: Path) -> None:
    written = bridle("init", tmp_path / "first")
    assert written.exit_code == 0, written.output
    names = {"agent.py", "run.toml", "tasks.jsonl", "verifier.py"}
    assert {file.name for file in (tmp_path / "first").iterdir()} == names
    (tmp_path / "first" / "agent.py").write_text("mine")
    refused = bridle("init", tmp_path / "first")
    assert refused.exit_code == 2
    assert "name another folder" in refused.output
    assert (tmp_path / "first" / "agent.py").read_text() == "mine"


def test_what_other_programs_recorded_is_imported_and_listed(
    bridle: Bridle, store: str, tmp_path: Path
) -> None:
    transcripts = Path(__file__).parents[1] / "reconstruct" / "transcripts"
    found = bridle("import", transcripts, "--store", store)
    assert found.exit_code == 0, found.output
    assert "2 sessions, 4 calls" in found.output
    assert "2 already_there" in bridle("import", transcripts, "--store", store).output
    assert bridle("sessions", "--store", store).output.count("What is in this folder?") == 2
    assert "the imported file has no token ids" in bridle("show", "last", "--store", store).output
    (tmp_path / "notes.jsonl").write_text("dear diary")
    assert "1 not_readable" in bridle("import", tmp_path, "--store", store).output
    for path in (tmp_path / "notes.jsonl", tmp_path / "nowhere"):
        refused = bridle("import", path, "--store", store)
        assert refused.exit_code == 2
        assert path.name in refused.output


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("proxy", "Missing option '--engine'"),
        ("run", "no command given, as in: bridle run -- python my_agent.py"),
        ("export x.txt --store STORE", "call it .jsonl, .parquet or .csv"),
        ("export x.jsonl --store STORE", "x.jsonl is there already: --force replaces it"),
        ("export y.jsonl --store STORE --where harnes=codex", "there are argv, continuation"),
        ('export y.jsonl --store STORE --rules {"thinking_loss":1}', "there are kinds, partial"),
        ("show ses_ --store STORE", "2 sessions begin with 'ses_': give more of the id"),
        ("show last --store STORE --turn 9", "has turns 1 to 2, not 9"),
        ("sft --model m --data x.jsonl --out o", "there is no option --model: use --policy"),
    ],
)
def test_a_mistake_is_answered_with_what_to_type(
    bridle: Bridle,
    store: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    typed: str,
    answer: str,
) -> None:
    transcripts = Path(__file__).parents[1] / "reconstruct" / "transcripts"
    assert bridle("import", transcripts, "--store", store).exit_code == 0
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").touch()
    refused = bridle(*(store if word == "STORE" else word for word in typed.split()))
    assert refused.exit_code in (1, 2), refused.output
    assert answer in " ".join(refused.output.replace("│", " ").split())


def test_a_reader_that_went_away_is_no_error(bridle: Bridle, store: str) -> None:
    transcripts = Path(__file__).parents[1] / "reconstruct" / "transcripts"
    assert bridle("import", transcripts, "--store", store).exit_code == 0
    typed = f"{sys.executable} -m bridle show last --store {store} --json | true"
    done = subprocess.run(["bash", "-c", typed], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_conversation_is_paged_in_a_terminal(
    bridle: Bridle, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transcripts = Path(__file__).parents[1] / "reconstruct" / "transcripts"
    assert bridle("import", transcripts, "--store", store).exit_code == 0
    monkeypatch.setenv("PAGER", f"cat > {tmp_path / 'paged'}")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    typed = [sys.executable, "-m", "bridle", "show", "last", "--store", store]
    ours, theirs = pty.openpty()
    assert subprocess.run(typed, stdin=theirs, stdout=theirs, check=False).returncode == 0
    os.close(theirs)
    os.close(ours)
    paged = (tmp_path / "paged").read_text()
    assert "What is in this folder?" in paged
    assert "\x1b[1mturn 1\x1b[0m" in paged, "its colours are kept"
