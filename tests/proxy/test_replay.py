"""Re-entry in the proxy: the comparison of requests, the choice of a recorded call, refusals."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import httpx
import openai
import pytest

from bridle.engine.scripted import ScriptedCall, ScriptedReply
from bridle.proxy.replay.aliases import Aliases
from bridle.proxy.replay.judgement import NOISE, Likeness, Verdict, judge
from bridle.proxy.replay.recorded import echoed, renamed
from bridle.proxy.wire.canonical import Message, Request
from bridle.proxy.wire.minting import as_base64

NOISY = {
    "chunk_id": ("Chunk ID: 0af3", "Chunk ID: 99b"),
    "wall_time": ("Wall time: 0.02 seconds", "Wall time: 1.5 seconds"),
    "process_group": ("Process Group PGID: 71", "Process Group PGID: 9912"),
    "duration": ("4 passed in 0.03s", "4 passed in 0.41s"),
    "timestamp": ("at 2026-01-02T03:04:05Z", "at 2026-11-12 13:14"),
    "date": ("today is Fri Nov 27 2026", "today is Mon Mar 3 2026"),
    "uuid": (
        "session 0d3ffdd2-3b6b-4d0c-b2e1-0f9f3f2a1b11",
        "session 1e4ffdd2-3b6b-4d0c-b2e1-0f9f3f2a1b22",
    ),
    "temporary_folder": ("/var/bridle-codex-abc/x", "/var/bridle-codex-def/x"),
}
OLD, NEW = NOISY["uuid"][0].split()[1], NOISY["uuid"][1].split()[1]


def verdict(sent: str, recorded: str, **rules: Any) -> Any:
    return judge(rules.pop("noise", {}), **rules).text("tool result", sent, recorded)


@pytest.mark.parametrize("rule", NOISE)
def test_each_rule_of_noise_covers_its_own_text_and_nothing_beside_it(rule: str) -> None:
    recorded, sent = NOISY[rule]
    assert verdict(sent, recorded) == Verdict(Likeness.NOISE, f"tool result: {rule}")
    beside = verdict(f"{sent}\nresult 5", f"{recorded}\nresult 4")
    assert beside.likeness is Likeness.DIVERGED
    assert "result 4" in beside.detail


@pytest.mark.parametrize(
    ("sent", "recorded", "likeness"),
    [
        ("a.txt\nb.txt", "b.txt\na.txt", Likeness.NOISE),
        ("in /new/work", "in /old/work", Likeness.PLACE),
        ("running with session ID 8001", "running with session ID 4", Likeness.HANDLE),
        ("session ID 2\nsession ID 1", "session ID 1\nsession ID 2", Likeness.NOISE),
        (f'{{"agent_id":"{NEW}"}}', f'{{"agent_id":"{OLD}"}}', Likeness.HANDLE),
        (f'{{"agent_id":"{NEW}"}} 5', f'{{"agent_id":"{OLD}"}} 4', Likeness.DIVERGED),
        ('{"nickname":"Tesla"} in 2 s', '{"nickname":"Curie"} in 3 s', Likeness.HANDLE),
        ('<task id="ses_a1b2c3d4">', '<task id="ses_d4c3b2a1">', Likeness.HANDLE),
        ("<task-id>a1</task-id>", "<task-id>b2</task-id>", Likeness.HANDLE),
        ("<duration_ms>31</duration_ms>", "<duration_ms>9</duration_ms>", Likeness.NOISE),
        ('{"id": 42}', '{"id": 41}', Likeness.DIVERGED),
        ("with ID: b1x7yk3q in /b1x7yk3q.o", "with ID: c2h9zk4q in /c2h9zk4q.o", Likeness.HANDLE),
        ("session ID 2 in /new", "session ID 1 in /old", Likeness.PLACE),
        ("Task a1b2 (type: local)", "Task b2a1 (type: local)", Likeness.HANDLE),
        (f"- {NEW}: Bohr", f"- {OLD}: Turing", Likeness.HANDLE),
        ("Background process: 77", "Background process: 12", Likeness.HANDLE),
        ("the process failed", "the process passed", Likeness.DIVERGED),
        ("Task done", "Task open", Likeness.DIVERGED),
        ("42", "41", Likeness.DIVERGED),
        ("pytest 8.3", "pytest 8.2", Likeness.DIVERGED),
    ],
)
def test_differences_get_their_names(sent: str, recorded: str, likeness: Likeness) -> None:
    assert verdict(sent, recorded, places=[("/old", "/new")]).likeness is likeness


def test_requests_differ_by_model_tools_and_number_of_messages() -> None:
    then = Request(dialect="chat", model="m", messages=(Message("user", "hi"),))
    results = (Message("tool", "1", tool_call_id="a"), Message("tool", "2", tool_call_id="b"))
    for now, expected in (
        (Request(dialect="chat", model="n", messages=then.messages), "model: 'm' was asked"),
        (Request(dialect="chat", model="m", messages=()), "messages: 1 were sent, now 0"),
        (Request(dialect="chat", model="m", messages=then.messages, tools=({},)), "tools: "),
        (Request(dialect="chat", model="m", messages=results[:1]), "user was sent, now tool a"),
    ):
        found = judge({}).request(now, then)
        assert found.likeness is Likeness.DIVERGED
        assert expected in found.detail
    one = Request(dialect="chat", model="m", messages=results)
    other = Request(dialect="chat", model="m", messages=results[::-1])
    assert judge({}).request(one, other).likeness is Likeness.SAME


def test_minted_values_are_found_and_renamed_in_every_form() -> None:
    old, new = "a" * 24, "b" * 24
    forms = (f"call_{old}00", f"fc_{old}01|x", f"resp_{old}", f"bridle.{old}02", old)
    for form in (*forms, as_base64(f"bridle.{old}02")):
        body = f'{{"id": "{form}"}}'.encode()
        assert echoed(body) == {f"call_{old}"}
        changed = renamed(body, {f"call_{old}": f"call_{new}"})
        assert echoed(changed) == {f"call_{new}"}
        assert len(changed) == len(body)
    assert echoed(old.upper().encode()) == frozenset()


def works(request: Any) -> ScriptedReply:
    """Two agents at a time, each told apart by its question; one tool call, then an answer."""
    name = request.messages[0]["content"]
    if request.messages[-1]["role"] == "tool":
        return ScriptedReply(f"{name} is done.")
    return ScriptedReply(tool_calls=(ScriptedCall("look", {"at": name}),))


TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def asks(url: str, *messages: Any) -> Any:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    reply = client.chat.completions.create(model="m", messages=list(messages), tools=[TOOL])
    return reply.choices[0].message


def streamed(url: str, *messages: Any) -> Any:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    asked = client.chat.completions.stream(model="m", messages=list(messages), tools=[TOOL])
    with asked as stream:
        return stream.get_final_completion().choices[0].message


def begins(url: str, name: str) -> list[Any]:
    question = {"role": "user", "content": name}
    reply = asks(url, question)
    assert reply.tool_calls[0].function.arguments == f'{{"at": "{name}"}}'
    result = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "seen"}
    return [question, reply.model_dump(exclude_none=True), result]


def opened(bench: Any, **origin: Any) -> httpx.Response:
    return httpx.post(f"{bench.url}/bridle/v1/sessions", json={"origin": origin}, timeout=60)


def test_agents_that_arrive_in_another_order_get_their_own_replies(stage: Any, bench: Any) -> None:
    stage.play = works
    url = f"{bench.url}/s/agents"
    for name in ("red", "blue"):
        asks(url, *begins(url, name))
    recorded = bench.calls()
    asked = len(stage.requests)
    again = f"{bench.url}/s/{opened(bench, session=recorded[0].session_id).json()['id']}"
    both = {name: begins(again, name) for name in ("blue", "red")}
    for name in ("red", "blue"):
        assert asks(again, *both[name]).content == f"{name} is done."
    assert len(stage.requests) == asked
    live = asks(again, *both["red"], {"role": "assistant", "content": "red is done."})
    assert live.tool_calls, "after the last recorded call the engine is asked"
    assert len(stage.requests) == asked + 1


def test_a_request_that_no_recorded_call_asks_is_refused_and_so_is_all_after_it(
    stage: Any, bench: Any
) -> None:
    stage.play = works
    url = f"{bench.url}/s/agents"
    asks(url, *begins(url, "red"))
    recorded = bench.calls()
    asked = len(stage.requests)
    again = opened(bench, session=recorded[0].session_id, call=recorded[1].id).json()["id"]
    messages = begins(f"{bench.url}/s/{again}", "red")
    messages[-1]["content"] = "hidden"
    for _ in range(2):
        with pytest.raises(openai.BadRequestError, match="turn 2, diverged: tool result"):
            asks(f"{bench.url}/s/{again}", *messages)
    assert len(stage.requests) == asked
    new = bench.reader.calls(again)
    assert [call.status for call in new] == ["complete", "failed", "failed"]
    assert [note.name for note in new[1].notes] == ["replay_diverged"]


def test_an_origin_that_cannot_be_replayed_is_refused(stage: Any, bench: Any) -> None:
    stage.play = works
    begins(f"{bench.url}/s/agents", "red")
    session = bench.call().session_id
    for origin, expected in (
        ({"session": "ses_none"}, "no session ses_none"),
        ({"session": session, "call": "call_none"}, "call call_none is no complete call"),
    ):
        refused = opened(bench, **origin)
        assert refused.status_code == 422
        assert expected in refused.json()["error"]["message"]
    assert len(list(bench.reader.sessions())) == 1


def test_a_re_entry_goes_on_in_another_process(stage: Any, bench: Any, start_proxy: Any) -> None:
    """The other process knows the calls, the grafted messages and the end from the store."""
    stage.play = works
    url = f"{bench.url}/s/agents"
    messages = begins(url, "red")
    messages[-1]["content"] = "seen, it took 3 s"
    answer = asks(url, *messages).content
    more = [{"role": "assistant", "content": answer}, {"role": "user", "content": "once more"}]
    asks(url, *messages, *more)
    recorded = bench.calls()
    asked = len(stage.requests)
    origin = {"session": recorded[0].session_id, "call": recorded[2].id}
    again = opened(bench, **origin).json()["id"]
    messages = begins(f"{bench.url}/s/{again}", "red")
    messages[-1]["content"] = "seen, it took 9 s"
    assert asks(f"{bench.url}/s/{again}", *messages).content == answer
    assert len(stage.requests) == asked
    other = start_proxy(stage.engine.base_url)
    assert asks(f"{other.url}/s/{again}", *messages, *more)
    assert len(stage.requests) == asked + 1
    calls = bench.reader.calls(again)
    assert [one.replayed_call_id for one in calls] == [recorded[0].id, recorded[1].id, None]
    assert {note.name for note in calls[2].notes} >= {"replay_live", "replay_noise"}
    prompts = [bench.reader.prompt_token_ids(one.id) for one in (recorded[2], calls[2])]
    assert prompts[0].tolist() == prompts[1].tolist()
    assert stage.requests[-1].messages[2]["content"] == "seen, it took 3 s"


def test_a_stopped_re_entry_stays_stopped_in_another_process(
    stage: Any, bench: Any, start_proxy: Any
) -> None:
    stage.play = works
    url = f"{bench.url}/s/agents"
    asks(url, *begins(url, "red"))
    recorded = bench.calls()
    again = opened(bench, session=recorded[0].session_id, call=recorded[1].id).json()["id"]
    messages = begins(f"{bench.url}/s/{again}", "red")
    wrong = [*messages[:-1], {**messages[-1], "content": "hidden"}]
    with pytest.raises(openai.BadRequestError, match="no longer follows"):
        asks(f"{bench.url}/s/{again}", *wrong)
    other = start_proxy(stage.engine.base_url)
    with pytest.raises(openai.BadRequestError, match="turn 2, diverged: tool result"):
        asks(f"{other.url}/s/{again}", *messages)


def test_replies_come_at_the_recorded_pace_if_that_is_asked(stage: Any, bench: Any) -> None:
    stage.play = works
    messages = begins(f"{bench.url}/s/agents", "red")
    time.sleep(0.6)
    asks(f"{bench.url}/s/agents", *messages)
    first, second = bench.calls()
    recorded = second.ended_at - first.started_at
    settings = {"replay": {"pace": "recorded"}}
    body = {"origin": {"session": first.session_id}, "settings": settings}
    again = httpx.post(f"{bench.url}/bridle/v1/sessions", json=body, timeout=60).json()["id"]
    url = f"{bench.url}/s/{again}"
    began = time.monotonic()
    asks(url, *begins(url, "red"))
    assert time.monotonic() - began >= recorded - 0.05


def background(request: Any) -> ScriptedReply:
    """Starts something in the background, and polls it by the name that the result has."""
    results = [m["content"] for m in request.messages if m["role"] == "tool"]
    if not results:
        return ScriptedReply(tool_calls=(ScriptedCall("start", {"cmd": "make"}),))
    if len(results) < 4:
        number = int(re.findall(r"session ID (\d+)", results[0])[0])
        return ScriptedReply(tool_calls=(ScriptedCall("poll", {"session_id": number}),))
    return ScriptedReply("done")


def works_on(url: str, number: int, stream: bool) -> list[str]:
    """Run a harness that knows its background process as ``number``; return the polls."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "build it"}]
    polls = []
    while True:
        asked: Any = {"model": "m", "messages": messages, "tools": [TOOL]}
        if stream:
            with client.chat.completions.stream(**asked) as events:
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**asked).choices[0].message
        if not message.tool_calls:
            return polls
        (call,) = message.tool_calls
        said = {"id": call.id, "type": "function"}
        said["function"] = {"name": call.function.name, "arguments": call.function.arguments}
        messages.append({"role": "assistant", "content": message.content, "tool_calls": [said]})
        if call.function.name == "poll":
            polls.append(call.function.arguments)
        result = f"Process running with session ID {number}"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


@pytest.mark.parametrize(
    ("stream", "streams_again"), [(False, False), (True, True), (False, True), (True, False)]
)
def test_names_of_background_work_are_translated_both_ways(
    stage: Any, bench: Any, start_proxy: Any, stream: bool, streams_again: bool
) -> None:
    """The harness gets the new name in replayed and live replies; the model sees the recorded."""
    stage.play = background
    assert works_on(f"{bench.url}/s/build", 8001, stream) == ['{"session_id": 8001}'] * 3
    recorded = bench.calls()
    asked = len(stage.requests)
    again = opened(bench, session=recorded[0].session_id, call=recorded[2].id).json()["id"]
    assert works_on(f"{bench.url}/s/{again}", 9081, streams_again) == ['{"session_id": 9081}'] * 3
    live = stage.requests[asked:]
    assert len(live) == len(recorded) - 2
    assert not any("9081" in str(request.messages) for request in live)
    calls = bench.reader.calls(again)
    assert [one.replayed_call_id is None for one in calls] == [False, False, True, True, True]
    assert "replay_handle" in {note.name for one in calls for note in one.notes}
    for one, other in zip(calls[2:], recorded[2:], strict=True):
        prompts = [bench.reader.prompt_token_ids(call.id) for call in (one, other)]
        assert prompts[0].tolist() == prompts[1].tolist()
    judged = {call.break_reason for call in bench.judged()}
    assert judged == {None}


def test_a_name_that_stands_for_two_others_is_no_alias() -> None:
    aliases = Aliases()
    assert aliases.learn("session ID 1", "session ID 5")
    assert aliases.learn("session ID 1", "session ID 5")
    assert not aliases.learn("session ID 2", "session ID 5")
    assert not aliases.learn("session ID 1", "session ID 6")
    assert not Aliases().learn("session ID 1, session ID 2", "session ID 1, session ID 1")
    swapped = Aliases()
    assert swapped.learn("session ID 1, session ID 2", "session ID 2, session ID 1")
    assert swapped.arguments('{"session_id": 1}') == '{"session_id": 2}'
    same = Aliases()
    assert same.learn("session ID 1", "session ID 1")
    assert not same, "nothing is to be translated"
    assert aliases.arguments('{"session_id": 1, "at": 1}') == '{"session_id": 5, "at": 1}'
    assert aliases.arguments('{"cmd": "kill -9 1"}') == '{"cmd": "kill -9 5"}'


def edited(stage: Any, bench: Any, edit: Any) -> tuple[str, list[Any]]:
    """Record a session of two calls; return one that re-enters its last, and its messages."""
    stage.play = looks_once
    url = f"{bench.url}/s/agents"
    system = {"role": "system", "content": "Be brief."}
    question = {"role": "user", "content": "red"}
    reply = asks(url, system, question)
    result = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "seen"}
    messages = [system, question, reply.model_dump(exclude_none=True), result]
    asks(url, *messages)
    first, second = bench.calls()
    results = {result["tool_call_id"]: edit["result"]} if "result" in edit else {}
    rules = {"edit": {"system": edit.get("system"), "tool_results": edit.get("other", results)}}
    origin = {"session": first.session_id, "call": second.id}
    body = {"origin": origin, "settings": {"replay": rules}}
    again = httpx.post(f"{bench.url}/bridle/v1/sessions", json=body, timeout=60).json()["id"]
    return again, messages


def looks_once(request: Any) -> ScriptedReply:
    if any(message["role"] == "tool" for message in request.messages):
        return ScriptedReply("red is done.")
    return ScriptedReply(tool_calls=(ScriptedCall("look", {"at": "red"}),))


@pytest.mark.parametrize("edit", [{"result": "hidden"}, {"system": "Be long."}])
def test_live_turns_see_edited_text_wherever_they_are_served(
    stage: Any, bench: Any, start_proxy: Any, edit: dict[str, str]
) -> None:
    again, messages = edited(stage, bench, edit)
    asked = len(stage.requests)
    for proxy in (bench, start_proxy(stage.engine.base_url)):
        url = f"{proxy.url}/s/{again}"
        first = asks(url, *messages[:2])
        messages[2:] = [
            first.model_dump(exclude_none=True),
            messages[3] | {"tool_call_id": first.tool_calls[0].id},
        ]
        said = asks(url, *messages)
        more = [{"role": "assistant", "content": said.content}, {"role": "user", "content": "on"}]
        asks(url, *messages, *more)
    live_requests = stage.requests[asked:]
    assert len(live_requests) == 4, "the first call is replayed"
    for request in live_requests:
        texts = [one.get("content") for one in request.messages]
        assert (texts[0] == "Be long.") == ("system" in edit)
        assert (texts[3] == "hidden") == ("result" in edit)
    replayed, live, *_ = bench.reader.calls(again)
    assert "replay_edited" not in {note.name for note in replayed.notes}
    (note,) = [note for note in live.notes if note.name == "replay_edited"]
    (tool,) = replayed.replies[0].tool_calls
    assert note.detail == ("system" if "system" in edit else tool.id)
    assert live.sampled_tokens


def test_text_that_the_turn_does_not_have_cannot_be_edited(stage: Any, bench: Any) -> None:
    again, messages = edited(stage, bench, {"other": {"call_none": "x"}})
    asked = len(stage.requests)
    url = f"{bench.url}/s/{again}"
    first = asks(url, *messages[:2])
    result = messages[3] | {"tool_call_id": first.tool_calls[0].id}
    with pytest.raises(openai.BadRequestError, match="has not all that is edited"):
        asks(url, *messages[:2], first.model_dump(exclude_none=True), result)
    assert len(stage.requests) == asked
    body = {"origin": {"session": bench.calls()[0].session_id}}
    body |= {"settings": {"replay": {"edit": {"system": "x"}}}}
    refused = httpx.post(f"{bench.url}/bridle/v1/sessions", json=body, timeout=60)
    assert "an edit needs the call" in refused.text
    for edit, problem in (
        ({"system": "x", "reply": {"text": "y"}}, "either a reply or the texts"),
        ({"reply": {"text": "y"}}, "continues no call"),
    ):
        calls = bench.calls()
        body["origin"] = {"session": calls[0].session_id, "call": calls[0].id}
        body["settings"] = {"replay": {"edit": edit}}
        refused = httpx.post(f"{bench.url}/bridle/v1/sessions", json=body, timeout=60)
        assert problem in refused.text


def test_a_name_of_letters_and_digits_is_translated_wherever_it_is() -> None:
    aliases = Aliases()
    assert aliases.learn(f'{{"agent_id":"{OLD}"}}', f'{{"agent_id":"{NEW}"}}')
    assert aliases.arguments(f'{{"targets":["{OLD}"]}}') == f'{{"targets":["{NEW}"]}}'
    result = Message("tool", f'{{"status":{{"{NEW}":"over"}}}}', tool_call_id="a")
    assert aliases.recorded(result).content == f'{{"status":{{"{OLD}":"over"}}}}'


@pytest.mark.parametrize("stream", [False, True])
def test_the_agent_acts_on_an_edited_reply(stage: Any, bench: Any, stream: bool) -> None:
    stage.play = looks_once
    question = {"role": "user", "content": "red"}
    url = f"{bench.url}/s/agents"
    reply = asks(url, question)
    result = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "seen"}
    asks(url, question, reply.model_dump(exclude_none=True), result)
    first, second = bench.calls()
    call = {"name": "look", "arguments": {"at": "blue"}}
    edit = {"reply": {"text": "Rather blue.", "tool_calls": [call]}}
    body = {
        "origin": {"session": first.session_id, "call": second.id},
        "settings": {"replay": {"edit": edit}},
    }
    again = httpx.post(f"{bench.url}/bridle/v1/sessions", json=body, timeout=60).json()["id"]
    asked, url = len(stage.requests), f"{bench.url}/s/{again}"
    for _ in range(2):  # a request that comes twice gets the edited reply twice
        given = streamed(url, question) if stream else asks(url, question)
        assert given.content == "Rather blue."
        assert json.loads(given.tool_calls[0].function.arguments) == {"at": "blue"}
    assert len(stage.requests) == asked, "the edited reply asks no engine"
    result |= {"tool_call_id": given.tool_calls[0].id, "content": "blue is seen"}
    said = asks(url, question, given.model_dump(exclude_none=True), result)
    assert said.content == "red is done."
    assert stage.requests[-1].messages[1]["content"] == "Rather blue."
    *_, replayed, live = bench.reader.calls(again)
    assert ("replay_edited", "reply") in {(one.name, one.detail) for one in replayed.notes}
    assert replayed.replies[0].content == "Rather blue."
    assert not replayed.sampled_tokens
    assert live.sampled_tokens
    assert live.break_reason == "parent_without_ids"
    assert live.parent_call_id == replayed.id
