"""``bridle replay``: a recorded command starts anew, and its first turns come from the record."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bridle.cli.commands.replay import turn_line
from bridle.engine.contract.tokenizer import Tokenizer
from bridle.engine.scripted import ScriptedEngine, ScriptedReply, ScriptedRequest
from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.reconstruct.audit import audit_session
from bridle.store.reading.queries import Reader
from support.processes import bridle

pytestmark = pytest.mark.usefixtures("warm_start")

AGENT = """
import json, openai, pathlib, sys
client = openai.OpenAI()
add = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
messages = [{"role": "user", "content": "What is 2 plus 3?"}]
for _ in range(2):
    reply = client.chat.completions.create(model="gpt-x", messages=messages, tools=[add])
    message = reply.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls or ():
        result = pathlib.Path("result.txt").read_text()
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(message.content)
"""


@pytest.fixture
def session(proxy_url: str, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A session of two turns, whose agent reads its tool's result from a file."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "agent.py").write_text(AGENT)
    (folder / "result.txt").write_text("5 (build 6), it took 3.1 s")
    monkeypatch.chdir(folder)
    done = bridle("run", "--proxy", proxy_url, "--", sys.executable, "agent.py")
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    with Reader(store) as reader:
        (only,) = reader.sessions()
    return only.id


def test_a_session_without_a_task_is_entered_again_in_its_own_folder(
    session: str, proxy_url: str, store: str, tmp_path: Path
) -> None:
    (tmp_path / "work" / "result.txt").write_text("5 (build 6), it took 9.7 s")
    done = bridle("replay", session, "--proxy", proxy_url, "--samples", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The answer is 5 (build 6), it took 3.1 s.\n" * 2
    assert "turn 1 (recorded turn 1): replayed, same" in done.stderr
    assert "turn 2 (recorded turn 2): noise, live; tool result" in done.stderr
    with Reader(store) as reader:
        siblings = [one for one in reader.sessions() if one.origin_session_id == session]
        branch = reader.calls(session)[1]
        assert [one.origin_call_id for one in siblings] == [branch.id] * 2
        assert [one.folder for one in siblings] == [str(tmp_path / "work")] * 2
        for one in siblings:
            replayed, live = reader.calls(one.id)
            assert (replayed.sampled_tokens, live.replayed_call_id) == (0, None)
            prompts = [reader.prompt_token_ids(call.id) for call in (branch, live)]
            assert prompts[0].tolist() == prompts[1].tolist()


@pytest.mark.parametrize("choice", ["stop", "live", "fail"])
def test_what_follows_a_divergence_is_chosen(
    session: str, proxy_url: str, store: str, tmp_path: Path, choice: str
) -> None:
    (tmp_path / "work" / "result.txt").write_text("6 (build 6), it took 3.1 s")
    done = bridle("replay", session, "--proxy", proxy_url, "--on-divergence", choice)
    where = "turn 2: diverged; turn 2, diverged: tool result"
    assert where in done.stderr
    assert (
        "'5 (build 6), it took 3.1 s' was recorded, now '6 (build 6), it took 3.1 s'" in done.stderr
    )
    assert (done.stdout == "The answer is 6 (build 6), it took 3.1 s.\n") == (choice == "live")
    assert (done.returncode == 0) == (choice == "live")
    with Reader(store) as reader:
        (sibling,) = [one for one in reader.sessions() if one.origin_session_id]
        last = reader.calls(sibling.id)[-1]
        assert (last.sampled_tokens is None or last.sampled_tokens == 0) == (choice != "live")


def test_the_live_turns_see_edited_text(
    session: str, proxy_url: str, store: str, tmp_path: Path
) -> None:
    with Reader(store) as reader:
        (tool,) = reader.calls(session)[0].replies[0].tool_calls
    file = tmp_path / "edit.json"
    file.write_text(json.dumps({"tool_results": {tool.id: "7"}}))
    done = bridle("replay", session, "--proxy", proxy_url, "--edit", str(file))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The answer is 7.\n"
    assert "turn 2 (recorded turn 2): edited, live; call_" in done.stderr
    with Reader(store) as reader:
        (sibling,) = [one for one in reader.sessions() if one.origin_session_id]
        assert sibling.settings["replay"]["edit"] == {"tool_results": {tool.id: "7"}}
    for text, problem in (("{", "no readable JSON"), ("[]", "no JSON object")):
        file.write_text(text)
        refused = bridle("replay", session, "--proxy", proxy_url, "--edit", str(file))
        assert refused.returncode == 2
        assert problem in refused.stderr


def test_a_rule_of_noise_is_added_and_none_may_match_a_lone_number(
    session: str, proxy_url: str, tmp_path: Path
) -> None:
    (tmp_path / "work" / "result.txt").write_text("5 (build 7), it took 3.1 s")
    plain = bridle("replay", session, "--proxy", proxy_url)
    assert "diverged" in plain.stderr
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps({"noise": {"build": r"build \d+"}}))
    done = bridle("replay", session, "--proxy", proxy_url, "--edit", str(rules))
    assert done.returncode == 0, done.stderr
    assert "noise, live; tool result" in done.stderr
    assert "build" in done.stderr
    for pattern, problem in ((r"\d+", "a lone number is no noise"), ("(", "cannot be replayed")):
        rules.write_text(json.dumps({"noise": {"any": pattern}}))
        refused = bridle("replay", session, "--proxy", proxy_url, "--edit", str(rules))
        assert refused.returncode == 1
        assert problem in refused.stderr


def test_missing_starts_places_and_turns_are_refused_before_anything_runs(
    session: str, recorded: str, proxy_url: str, store: str, tmp_path: Path
) -> None:
    with Reader(store) as reader:
        by_hand = reader.session_by_name(recorded)
    assert by_hand is not None
    for arguments, expected in (
        ([by_hand.id], "record the agent with `bridle run"),
        ([session, "--reset"], "has no recorded commit"),
        ([session, "--from", "9"], "there are 1, 2"),
    ):
        done = bridle("replay", *arguments, "--proxy", proxy_url)
        assert done.returncode != 0
        assert expected in done.stderr
    os.rename(tmp_path / "work", tmp_path / "elsewhere")
    done = bridle("replay", session, "--proxy", proxy_url)
    assert f"the session ran in {tmp_path / 'work'}, which is not there" in done.stderr
    with Reader(store) as reader:
        assert not [one for one in reader.sessions() if one.origin_session_id]


@pytest.mark.parametrize("sandbox", ["process", "forked"])
@pytest.mark.sampled(2)
def test_sessions_of_a_run_are_entered_again_by_their_job(
    proxy_url: str, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sandbox: str
) -> None:
    """Siblings run at once, and each sees the recorded folder's path, which its prompt has."""
    monkeypatch.chdir(tmp_path)
    prompt = 'f"What is 2 plus 3 in {pathlib.Path.cwd()}?"'
    agent = AGENT.replace('"What is 2 plus 3?"', prompt)
    Path("agent.py").write_text(agent)
    task = {"id": "sum", "prompt": "-", "files": {"result.txt": "5"}, "payload": {"answer": "5"}}
    Path("tasks.jsonl").write_text(f"{json.dumps(task)}\n")
    options = ["--agent", "agent.py", "--tasks", "tasks.jsonl", "--verifier", "number"]
    made = ["--group-size", "2", "--parallel", "2", "--set", f"agent.sandbox={sandbox}"]
    done = bridle("rollout", "--proxy", proxy_url, *options, *made)
    assert done.returncode == 0, done.stderr
    with Reader(store) as reader:
        recorded = max(reader.sessions(), key=lambda one: one.folder or "")
    assert recorded.folder is not None
    assert recorded.folder.endswith("place-1/workspace")
    done = bridle("replay", recorded.id, "--proxy", proxy_url, "--samples", "3")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("turn 1 (recorded turn 1): replayed, same") == 3
    assert done.stderr.count("turn 2 (recorded turn 2): live") == 3
    assert done.stdout.count("reward 1") == 3
    with Reader(store) as reader:
        siblings = [one for one in reader.sessions() if one.origin_session_id == recorded.id]
        assert {one.folder for one in siblings} == {recorded.folder}
        assert len({one.group_id for one in siblings}) == 1
        run_id = siblings[0].run_id or ""
        assert reader.run(run_id).kind == "replay"
    done = bridle("replay", siblings[0].id, "--proxy", proxy_url)
    assert "turn 1 (recorded turn 1): replayed, same" in done.stderr, done.stderr
    os.rename("tasks.jsonl", "others.jsonl")
    done = bridle("replay", recorded.id, "--proxy", proxy_url)
    assert done.returncode != 0
    assert "tasks.jsonl" in done.stderr


def test_a_check_scores_siblings_in_copies_of_the_folder(
    session: str, proxy_url: str, store: str, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    git = ["git", "-C", str(work), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "One"]):
        subprocess.run([*git, *words], check=True)
    os.chdir(work)
    assert bridle("run", "--proxy", proxy_url, "--", sys.executable, "agent.py").returncode == 0
    with Reader(store) as reader:
        recorded = max(reader.sessions(), key=lambda one: one.created_at)
    (work / "result.txt").write_text("6")
    check = f"grep -q build result.txt && test $PWD = {work} && touch left.txt"
    options = ["--samples", "2", "--reset", "--check", check]
    done = bridle("replay", recorded.id, "--proxy", proxy_url, *options)
    assert done.stdout.count("reward 1") == 2, done.stderr
    assert not (work / "left.txt").exists()
    assert (work / "result.txt").read_text() == "6"
    done = bridle("replay", recorded.id, "--proxy", proxy_url, "--check", "false")
    assert done.stdout.count("reward 0") == 1


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.sampled(2)
def test_live_turns_ask_another_engine_by_its_own_tokenizer(
    session: str, model_dir: Path, store: str, tmp_path: Path, same: bool
) -> None:
    """No proxy runs. The recorded ids are the prompt only where they are the engine's."""
    directory = model_dir
    if not same:
        directory = tmp_path / "other"
        train_tokenizer(directory, ["Other words, in another order: 3 2 1."] * 20, vocab_size=400)

    def answers(request: ScriptedRequest) -> ScriptedReply:
        return ScriptedReply(f"Read {'5 (build 6)' in request.prompt_text}.")

    with ScriptedEngine(directory, answers, served_model_name="other") as engine:
        options = ("--engine", engine.base_url, "--store", store, "--proxy", "http://127.0.0.1:9")
        done = bridle("replay", session, *options)
        assert done.returncode == 0, done.stderr
        asked = [one for one in engine.requests if one.messages[0]["content"] != "Hi"]
        assert len(asked) == 1, "one live turn, beside the question for a token"
    assert done.stdout == "Read True.\n"
    with Reader(store) as reader:
        (sibling,) = [one for one in reader.sessions() if one.origin_session_id == session]
        calls = reader.calls(session)
        live = reader.calls(sibling.id)[1]
        prompts = [reader.prompt_token_ids(call.id) for call in (calls[1], live)]
        assert (prompts[0].tolist() == prompts[1].tolist()) is same
        assert ("tokenizer_differs" in {note.name for note in live.notes}) is not same
        assert audit_session(reader, sibling.id, bodies=True).clean


def test_live_turns_ask_an_engine_that_serves_a_policy(
    session: str, model_dir: Path, store: str, tmp_path: Path
) -> None:
    shape = TinyShape(hidden=32, layers=1, heads=1, kv_heads=1, intermediate=64, context=2048)
    policy = tmp_path / "policy"
    shutil.copytree(model_dir, policy)
    size = Tokenizer(policy).backend.get_vocab_size()
    make_policy(policy, shape, vocab_size=size, seed=3)
    done = bridle("replay", session, "--policy", str(policy), "--store", store)
    assert "turn 2 (recorded turn 2): live" in done.stderr, done.stderr


def test_the_line_of_a_turn_names_the_recorded_one() -> None:
    live = {"turn": 3, "replayed_call_id": None, "notes": []}
    assert turn_line(live, {}) == "turn 3: live"
