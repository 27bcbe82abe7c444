"""``bridle replay --edit`` with another reply, to which an installed program goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bridle.bench.shell_policy import SHELLS, text_of, tool_names, train_bench_tokenizer
from bridle.engine.scripted import ScriptedCall, ScriptedEngine, ScriptedReply, ScriptedRequest
from bridle.harnesses.install import search_path
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.reconstruct.audit import audit_session
from bridle.store.reading.queries import Reader
from support.processes import bridle

COMMANDS = {
    "codex": ("codex", "exec", "--dangerously-bypass-approvals-and-sandbox", "write a word"),
    "pi": ("pi", "-p", "write a word"),
}


def writes_then_tells(request: ScriptedRequest) -> ScriptedReply:
    """Writes a word with the shell, then repeats what the shell printed."""
    shell = next((name for name in SHELLS if name in tool_names(request)), None)
    printed = [text_of(message) for message in request.messages if message["role"] == "tool"]
    if shell is None:
        return ScriptedReply("A side remark.")
    if not printed:
        return ScriptedReply(tool_calls=(ScriptedCall(shell, writing(shell, "red")),))
    return ScriptedReply(f"It printed {'blue' if 'blue' in printed[-1] else 'red'}.")


def writing(shell: str, word: str) -> dict[str, object]:
    return SHELLS[shell](f"echo {word} | tee {word}.txt")


@pytest.mark.replay
@pytest.mark.usefixtures("warm_start")
@pytest.mark.parametrize("harness", COMMANDS)
def test_a_program_runs_the_tools_of_an_edited_reply_and_goes_on_live(
    harness: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, store = tmp_path / "model", str(tmp_path / "bridle.db")
    train_bench_tokenizer(model)
    for folder in ("home", "work"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("BRIDLE_HOME", str(tmp_path / "own"))
    monkeypatch.setenv("PATH", search_path(os.environ["PATH"]))
    monkeypatch.chdir(tmp_path / "work")
    with (
        ScriptedEngine(model, writes_then_tells, max_model_len=1 << 20) as engine,
        ProxyServer(ProxySettings(engine.base_url, store, tokenizer_dir=model)) as proxy,
        Reader(store) as reader,
    ):
        done = bridle("run", "--proxy", proxy.base_url, "--", *COMMANDS[harness])
        assert "It printed red." in done.stdout, done.stderr
        (session,) = reader.sessions()
        recorded = reader.calls(session.id)
        (tool,) = recorded[0].replies[0].tool_calls
        Path("red.txt").unlink()
        call = {"name": tool.name, "arguments": writing(tool.name, "blue")}
        edit = {"reply": {"text": "Rather blue.", "tool_calls": [call]}}
        (tmp_path / "edit.json").write_text(json.dumps(edit))
        asked = len(engine.requests)
        done = bridle(
            *("replay", session.id, "--proxy", proxy.base_url),
            *("--from", len(recorded), "--edit", tmp_path / "edit.json"),
        )
        assert done.returncode == 0, done.stderr
        assert "It printed blue." in done.stdout, done.stderr
        assert len(engine.requests) == asked + 1, "the edited reply asks no engine"
        assert sorted(file.name for file in Path().iterdir()) == ["blue.txt"]
        (sibling,) = [one for one in reader.sessions() if one.origin_session_id == session.id]
        assert sibling.settings["replay"]["edit"] == edit
        replayed, live = reader.calls(sibling.id)
        assert ("replay_edited", "reply") in {(one.name, one.detail) for one in replayed.notes}
        assert replayed.replies[0].content == "Rather blue."
        assert not replayed.sampled_tokens
        assert live.sampled_tokens
        assert live.parent_call_id == replayed.id
        assert audit_session(reader, sibling.id, bodies=True).clean
