"""Test which session a call belongs to, with and without set-up, before and after a restart."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from bridle.engine.scripted import ScriptedCall, ScriptedReply
from bridle.proxy.session.memory import SessionMemory
from bridle.proxy.session.registry import Sessions
from bridle.proxy.session.rules import effective
from bridle.proxy.settings import ProxySettings
from bridle.proxy.wire.canonical import Sampling
from bridle.store.errors import StoreUnavailable
from bridle.store.operations.gates import Gates
from bridle.store.operations.retention import forget
from bridle.store.reading.queries import Reader
from bridle.store.records import BreakReason, CallKind, CallStatus, SessionRecord
from bridle.store.schema.database import migrate
from bridle.store.writing.job_queue import WriteJob, WriteResult
from bridle.store.writing.writer import Writer

CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def say(bench: Any, messages: list[Any], path: str = CHAT, **options: Any) -> Any:
    headers = options.pop("headers", {})
    body = {"model": "m", "messages": messages, **options}
    response = httpx.post(bench.url + path, json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"] | {
        "session": response.headers["x-bridle-session"]
    }


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_path_session_is_created_on_first_use_and_kept(bench: Any) -> None:
    first = say(bench, [user("one")], f"/s/my-run{CHAT}")
    second = say(bench, [user("two")], f"/s/my-run{CHAT}")
    assert first["session"] == second["session"]
    by_id = say(bench, [user("three")], f"/s/{first['session']}{CHAT}")
    assert by_id["session"] == first["session"]
    assert bench.reader.session(first["session"]).name == "my-run"


def test_a_path_session_that_looks_like_an_id_must_exist(bench: Any, ask: Any) -> None:
    assert httpx.post(f"{bench.url}/s/ses_nope{CHAT}", json=ask).status_code == 404
    assert httpx.post(f"{bench.url}/s/..%2Fx{CHAT}", json=ask).status_code in (400, 404)


def test_a_session_named_by_anothers_id_does_not_take_its_calls(bench: Any) -> None:
    first = say(bench, [user("one")], f"/s/mine{CHAT}")["session"]
    made = httpx.post(f"{bench.url}/bridle/v1/sessions", json={"name": first}).raise_for_status()
    say(bench, [user("two")], f"/s/{made.json()['id']}{CHAT}")
    assert say(bench, [user("three")], f"/s/{first}{CHAT}")["session"] == first


def test_first_uses_at_the_same_time_make_one_session(bench: Any) -> None:
    with ThreadPoolExecutor(8) as pool:
        said = list(pool.map(lambda i: say(bench, [user(str(i))], f"/s/crowd{CHAT}"), range(8)))
    assert len({one["session"] for one in said}) == 1


def test_a_session_that_could_not_be_created_fails_its_call_and_is_looked_for_again(
    bench: Any, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "_write", lambda _, jobs: [_lost(job) for job in jobs])
        response = httpx.post(f"{bench.url}/s/unlucky{CHAT}", json=ask)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "store_unavailable"
    assert list(bench.reader.sessions()) == []
    said = say(bench, [user("once more")], f"/s/unlucky{CHAT}")
    assert bench.reader.session(said["session"]).name == "unlucky"


def _lost(job: WriteJob) -> WriteResult:
    return WriteResult(job, StoreUnavailable("the disk is full"))


@pytest.mark.parametrize(
    ("headers", "harness", "role"),
    [
        (
            {"session-id": "abc", "thread-id": "abc", "user-agent": "codex_exec/0.169"},
            "codex",
            None,
        ),
        ({"session-id": "abc", "thread-id": "t2", "user-agent": "codex_exec/0.169"}, "codex", "t2"),
        ({"x-claude-code-session-id": "abc", "user-agent": "claude-cli/2.1"}, "claude-code", None),
        (
            {"x-claude-code-session-id": "abc", "x-claude-code-agent-id": "explore"},
            "claude-code",
            "explore",
        ),
        ({"x-session-id": "abc", "user-agent": "opencode/1.18"}, "opencode", None),
        ({"x-session-id": "abc", "user-agent": "OpenAI/Python 2.1"}, "openai-python", None),
        ({"x-session-id": "abc", "user-agent": "my-app/1"}, None, None),
    ],
)
def test_a_harnesss_own_session_id_names_the_session(
    bench: Any, headers: dict[str, str], harness: str | None, role: str | None
) -> None:
    first = say(bench, [user("one")], headers=headers)
    second = say(bench, [user("two")], headers=headers)
    assert first["session"] == second["session"]
    session = bench.reader.session(first["session"])
    assert (session.name, session.harness) == (f"{harness or 'client'}-abc", harness)
    assert [call.role for call in bench.calls()] == [role, role]
    if role:
        assert bench.judged()[0].kind is CallKind.SUBAGENT


def test_without_any_id_the_conversation_finds_its_session(bench: Any) -> None:
    first = say(bench, [user("one")])
    other = say(bench, [user("another")])
    history = [user("one"), {"role": "assistant", "content": first["content"]}]
    second = say(bench, [*history, user("and then?")])
    assert second["session"] == first["session"] != other["session"]
    call = bench.reader.calls(first["session"])[-1]
    assert call.lineage_rule == "content"
    assert call.parent_call_id == bench.reader.calls(first["session"])[0].id
    said = call.conversation
    assert [(message.role, message.content) for message in said.tail] == [("user", "and then?")]
    assert (said.length, said.tools) == (3, ())


def test_equal_conversations_one_after_the_other_are_sessions_of_their_own(bench: Any) -> None:
    """A script is run again, and a deterministic policy answers the same."""
    runs = []
    for _ in range(3):
        history: list[dict[str, Any]] = []
        for text in ("one", "two", "three"):
            history.append(user(text))
            said = say(bench, history)
            history.append({"role": "assistant", "content": said["content"]})
            runs.append(said["session"])
    assert [runs.count(session) for session in dict.fromkeys(runs)] == [3, 3, 3]
    assert runs == sorted(runs, key=runs.index), "no run has a call of another"


def test_a_reply_that_repeats_the_question_does_not_lead_the_next_run_to_its_session(
    stage: Any, bench: Any
) -> None:
    text = "The quick brown fox jumps over the lazy dog, and then it goes home to sleep."
    asked = user(f"Correct this, and say nothing else: {text}")
    stage.play = lambda request: text if len(request.messages) == 1 else "Very."
    sessions = []
    for _ in range(2):
        first = say(bench, [asked])
        second = say(bench, [asked, {"role": "assistant", "content": text}, user("Is it formal?")])
        sessions.append([first["session"], second["session"]])
    assert [len(set(run)) for run in sessions] == [1, 1]
    assert sessions[0] != sessions[1]
    assert [call.break_reason for call in bench.calls()] == [None] * 4


def test_equal_conversations_at_once_have_as_many_calls_each(bench: Any) -> None:
    first, second = say(bench, [user("one")]), say(bench, [user("one")])
    history = [user("one"), {"role": "assistant", "content": first["content"]}, user("two")]
    again = {say(bench, history)["session"], say(bench, history)["session"]}
    assert again == {first["session"], second["session"]}


def test_an_anonymous_conversation_goes_on_at_another_proxy_of_the_same_store(
    bench: Any, stage: Any, start_proxy: Any
) -> None:
    other = start_proxy(stage.engine.base_url)
    first = say(bench, [user("one")])
    history = [user("one"), {"role": "assistant", "content": first["content"]}, user("two")]
    second = say(other, history)
    assert second["session"] == first["session"]
    history += [{"role": "assistant", "content": second["content"]}, user("three")]
    other.server.stop()
    assert say(bench, history)["session"] == first["session"]


def test_an_anonymous_call_that_another_proxy_saw_running_is_continued_there(
    bench: Any, stage: Any, start_proxy: Any
) -> None:
    other = start_proxy(stage.engine.base_url)
    stage.play = lambda request: ScriptedReply(
        "The answer is four.", delay=0.1 if request.messages == [user("one")] else 0.0
    )
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(say, bench, [user("one")])
        while not bench.calls():
            time.sleep(0.01)
        # Nothing here explains its history: the other proxy asks the store.
        say(other, [user("two"), {"role": "assistant", "content": "2"}, user("three")])
        first = running.result()
    history = [user("one"), {"role": "assistant", "content": first["content"]}, user("two")]
    assert say(other, history)["session"] == first["session"]


def test_a_conversation_that_goes_on_after_its_seal_is_whole_in_its_new_session(
    stage: Any, start_proxy: Any, model_dir: Path
) -> None:
    bench = start_proxy(stage.engine.base_url, tokenizer_dir=model_dir)
    first = say(bench, [user("one")])
    httpx.post(f"{bench.url}/bridle/v1/sessions/{first['session']}/seal").raise_for_status()
    history = [user("one"), {"role": "assistant", "content": first["content"]}, user("two")]
    second = say(bench, history)
    history += [{"role": "assistant", "content": second["content"]}, user("three")]
    bench.server.stop()

    again = start_proxy(stage.engine.base_url, tokenizer_dir=model_dir)
    third = say(again, history)
    assert first["session"] != second["session"] == third["session"]
    begun, continued = again.reader.calls(second["session"])
    assert (begun.parent_call_id, continued.parent_call_id) == (None, begun.id)
    assert [message.content for message in begun.conversation.tail] == [
        "one",
        first["content"],
        "two",
    ]


@pytest.mark.parametrize("path", [CHAT, f"/s/daily{CHAT}"])
def test_a_session_that_was_deleted_costs_one_call_and_is_opened_anew(
    bench: Any, path: str
) -> None:
    """The session is deleted as ``bridle forget`` does it while the proxy runs."""
    first = say(bench, [user("one")], path)
    forget(bench.reader.engine, [first["session"]])
    history = [user("one"), {"role": "assistant", "content": first["content"]}, user("two")]
    lost = httpx.post(bench.url + path, json={"model": "m", "messages": history})
    assert lost.status_code == 503
    second = say(bench, history, path)
    assert second["session"] != first["session"]
    history += [{"role": "assistant", "content": second["content"]}, user("three")]
    assert say(bench, history, path)["session"] == second["session"]
    begun, continued = bench.calls()
    assert (begun.parent_call_id, continued.parent_call_id) == (None, begun.id)
    assert len(begun.conversation.tail) == 3


def test_an_echoed_tool_call_finds_its_session_also_after_a_restart(
    stage: Any, start_proxy: Any
) -> None:
    stage.play = lambda request: (
        ScriptedReply(tool_calls=(ScriptedCall("add", {"a": 1, "b": 2}),))
        if request.messages[-1]["role"] == "user"
        else ScriptedReply("The sum is 3.")
    )
    bench = start_proxy(stage.engine.base_url)
    first = say(bench, [user("one and two?")], tools=TOOLS)
    (call,) = first["tool_calls"]
    bench.server.stop()

    again = start_proxy(stage.engine.base_url)
    history = [
        user("one and two?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "3"},
    ]
    second = say(again, history, tools=TOOLS)
    assert second["session"] == first["session"]
    row = again.calls()[-1]
    assert row.lineage_rule == "minted_id"
    assert row.parent_call_id == again.calls()[0].id


def test_a_restarted_proxy_continues_a_named_session(stage: Any, start_proxy: Any) -> None:
    bench = start_proxy(stage.engine.base_url)
    first = say(bench, [user("one")], f"/s/x{CHAT}")
    bench.server.stop()
    again = start_proxy(stage.engine.base_url)
    history = [user("one"), {"role": "assistant", "content": first["content"]}, user("two")]
    second = say(again, history, f"/s/x{CHAT}")
    assert second["session"] == first["session"]
    assert again.calls()[-1].parent_call_id == again.calls()[0].id


@pytest.mark.sampled(0)
def test_a_restarted_proxy_continues_an_anonymous_conversation_older_than_many_named_sessions(
    stage: Any, start_proxy: Any
) -> None:
    bench = start_proxy(stage.engine.base_url)
    first = say(bench, [user("one")])
    for number in range(80):
        say(bench, [user("one")], f"/s/run-{number}{CHAT}")
    bench.server.stop()
    again = start_proxy(stage.engine.base_url)
    history = [user("one"), {"role": "assistant", "content": first["content"]}, user("two")]
    assert say(again, history)["session"] == first["session"]


def test_two_proxies_on_one_store_continue_each_others_sessions(
    stage: Any, start_proxy: Any
) -> None:
    left, right = start_proxy(stage.engine.base_url), start_proxy(stage.engine.base_url)
    history: list[Any] = []
    for turn, bench in enumerate([left, right, left, right, left]):
        history.append(user(f"turn {turn}"))
        said = say(bench, history, f"/s/shared{CHAT}")
        history.append({"role": "assistant", "content": said["content"]})
    rows = left.calls()
    assert [row.parent_call_id for row in rows] == [None, *(row.id for row in rows[:-1])]


@pytest.fixture
def exact(stage: Any, start_proxy: Any, model_dir: Any) -> Any:
    return start_proxy(stage.engine.base_url, tokenizer_dir=model_dir)


def test_history_is_sent_as_the_recorded_ids(exact: Any, stage: Any) -> None:
    stage.play = lambda _: ScriptedReply("The answer is four.", reasoning="one two three")
    first = say(exact, [user("one")])
    # The harness drops the reasoning, so a rendering of its history would lose those tokens.
    history = [user("one"), {"role": "assistant", "content": first["content"]}, user("two")]
    say(exact, history)

    before, after = exact.calls()
    path = [
        *exact.reader.prompt_token_ids(before.id),
        *exact.reader.sampled(before.id)[0].token_ids,
    ]
    prompt = list(stage.requests[1].prompt_ids)
    assert prompt[: len(path)] == path
    assert list(exact.reader.prompt_token_ids(after.id)) == prompt
    assert after.break_reason is None
    assert after.status is CallStatus.COMPLETE


def test_a_rendered_session_says_why_it_broke(exact: Any, stage: Any) -> None:
    stage.play = lambda _: ScriptedReply("The answer is four.", reasoning="one two three")
    created = httpx.post(
        f"{exact.url}/bridle/v1/sessions", json={"continuation": "rendered"}
    ).json()
    path = f"/s/{created['id']}{CHAT}"
    first = say(exact, [user("one")], path)
    history = [user("one"), {"role": "assistant", "content": first["content"]}, user("two")]
    say(exact, history, path)
    assert exact.judged()[-1].break_reason is BreakReason.REASONING_DROPPED


def test_session_settings_pin_and_cap_what_is_sampled(bench: Any, stage: Any) -> None:
    rules = {"pin": {"temperature": 1.0}, "cap": {"max_tokens": 2}}
    created = httpx.post(f"{bench.url}/bridle/v1/sessions", json={"settings": rules}).json()
    say(bench, [user("one")], f"/s/{created['id']}{CHAT}", temperature=0.2, max_tokens=50)
    call = bench.call()
    assert call.sampling == {"temperature": 1.0, "max_tokens": 2}
    assert call.sampled_tokens == 2
    assert {note.name for note in call.notes} == {"sampling_pinned", "sampling_capped"}


@pytest.mark.parametrize(
    ("name", "cap", "asked", "sent"),
    [
        ("max_tokens", 512, None, 512),
        ("temperature", 1.5, None, 1.0),
        ("temperature", 0.7, None, 0.7),
        ("temperature", 1.5, 1.2, 1.2),
        ("presence_penalty", 0.5, None, 0.0),
        ("repetition_penalty", 1.3, None, 1.0),
        ("top_k", 50, None, 50),
        ("top_k", 50, -1, 50),
        ("top_k", 50, 20, 20),
    ],
)
def test_a_cap_bounds_what_is_sampled_and_raises_nothing(
    name: str, cap: float, asked: float | None, sent: float
) -> None:
    given, notes = effective(Sampling(**{name: asked}), {"cap": {name: cap}})
    assert getattr(given, name) == sent
    assert bool(notes) == (asked is not None and asked != sent)


async def test_a_session_that_changed_elsewhere_leaves_nothing_behind(tmp_path: Path) -> None:
    """The session changes as each one does in every worker that did not seal it."""
    path = str(tmp_path / "bridle.db")
    migrate(path)
    with Writer(path) as writer, closing(Reader(path)) as reader:
        memory = SessionMemory(reader, 1 << 20)
        settings = ProxySettings("http://engine", path)
        gates = Gates(reader.engine, "one")

        async def is_sealed(session_id: str) -> bool:
            return gates.is_sealed(session_id)

        async def is_named(name: str) -> bool:
            return gates.is_named(name)

        sessions = Sessions(settings, writer, reader, memory, is_sealed, is_named)
        made = SessionRecord("ses_1", time.time(), name="lamp", key_hash="hash")
        await sessions.create(made)
        sessions.forget(made.id)
        assert not memory._ids
        assert memory._size == 0
        found = await sessions.find("lamp")
        assert found is not None
        assert found.record == made
        assert await sessions.current(found) is found
        await writer.seal_session(made.id, "done", time.time())
        assert (await sessions.current(found)).record.outcome == "done"
        gates.close()
