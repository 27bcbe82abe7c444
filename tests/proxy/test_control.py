"""The control API: sessions, rewards, sealing, policy versions and the pause gate."""

from __future__ import annotations

import json
import re
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from sqlalchemy import text

from bridle.engine.scripted import ScriptedReply, Stall
from bridle.proxy.continuation.continuation import Continuer

CHAT = "/v1/chat/completions"


@pytest.fixture
def control(bench: Any) -> Any:
    with httpx.Client(base_url=f"{bench.url}/bridle/v1") as client:
        yield client


def test_a_new_session_hands_out_what_a_harness_needs(bench: Any, control: Any, ask: Any) -> None:
    task = {"id": "t1", "suite": "sums", "split": "train", "payload": {"question": "1+1"}}
    response = control.post(
        "/sessions",
        json={"name": "run-1", "task": task, "group_id": "g1", "harness": "langchain",
              "labels": {"x": 1}, "ttl_s": 60},
    )  # fmt: skip
    assert response.status_code == 201
    made = response.json()
    environment = made["environment"]
    client = openai.OpenAI(
        base_url=environment["OPENAI_BASE_URL"], api_key=environment["OPENAI_API_KEY"]
    )
    assert client.chat.completions.create(**ask).choices[0].message.content
    session = bench.reader.session(made["id"])
    assert (session.task_id, session.group_id, session.harness) == ("t1", "g1", "langchain")
    assert bench.reader.task_of(session).payload == {"question": "1+1"}
    assert bench.call().session_id == made["id"]
    assert made["base_urls"]["anthropic"] == f"{bench.url}/s/{made['id']}"
    state = control.get(f"/sessions/{made['id']}").json()
    assert state["calls"] == {"complete": 1}
    other = control.post("/sessions", json={}).json()
    listed = {one["id"]: one["calls"] for one in control.get("/sessions").json()}
    assert listed == {made["id"]: {"complete": 1}, other["id"]: {}}
    assert control.post(f"/sessions/{made['id']}/seal").json()["calls"] == {"complete": 1}
    assert "key" not in state


def test_a_sessions_calls_are_read_with_what_was_said(bench: Any, control: Any, ask: Any) -> None:
    made = control.post("/sessions", json={}).json()
    client = openai.OpenAI(base_url=made["base_urls"]["openai"], api_key=made["key"])
    first = client.chat.completions.create(**ask).choices[0].message
    history = [*ask["messages"], first.model_dump(exclude_none=True)]
    more = {"role": "user", "content": "and again?"}
    client.chat.completions.create(**{**ask, "messages": [*history, more]})
    one, two = control.get(f"/sessions/{made['id']}/calls").json()
    assert (one["turn"], one["continues"], two["turn"], two["continues"]) == (1, None, 2, 1)
    assert one["messages"] == ask["messages"]
    assert two["messages"] == [more]
    assert one["replies"][0]["content"] == first.content
    assert (one["status"], one["sampled_tokens"] > 0) == ("complete", True)
    assert control.get(f"/sessions/{made['id']}/calls?first=2").json() == [two]
    assert control.get("/sessions/ses_none/calls").status_code == 404


def test_a_session_keeps_how_it_was_started(control: Any) -> None:
    start = {"argv": ["codex", "exec"], "folder": "/work", "environment_names": ["HOME", "TZ"]}
    known = control.post("/sessions", json={"start": start}).json()
    late = control.post("/sessions", json={}).json()
    sealed = control.post(f"/sessions/{late['id']}/seal", json={"start": start | {"tz": "UTC"}})
    shown = control.get(f"/sessions/{known['id']}").json()
    assert {name: shown[name] for name in start} == start
    assert (shown["tz"], sealed.json()["tz"], sealed.json()["argv"]) == (None, "UTC", start["argv"])
    assert control.post("/sessions", json={"start": {"environment": {}}}).status_code == 422


def test_a_call_is_shown_as_the_view_shows_it(bench: Any, control: Any, ask: Any) -> None:
    made = control.post("/sessions", json={}).json()
    client = openai.OpenAI(base_url=made["base_urls"]["openai"], api_key=made["key"])
    client.chat.completions.create(**ask)
    (shown,) = control.get(f"/sessions/{made['id']}/calls").json()
    with bench.reader.engine.connect() as connection:
        row = connection.execute(text("SELECT * FROM turns")).mappings().one()
    for name in ("dialect", "started_at", "model_requested", "version_end", "finish_reason"):
        assert shown[name] == row[name]
    assert shown["usage"] == json.loads(row["usage"])
    assert "request_sha256" not in shown


def test_a_taken_name_is_a_409_and_an_unknown_field_a_422(control: Any) -> None:
    assert control.post("/sessions", json={"name": "a"}).status_code == 201
    assert control.post("/sessions", json={"name": "a"}).status_code == 409
    wrong = control.post("/sessions", json={"nmae": "a"})
    assert wrong.status_code == 422
    assert wrong.json()["error"]["param"] == "nmae"
    assert control.post("/sessions", json={"settings": {"pin": {"x": 1}}}).status_code == 422
    assert control.post("/sessions", json={"settings": {"budgt": {}}}).status_code == 422
    assert control.post("/sessions", content=b"{").status_code == 422


def test_a_task_that_cannot_be_stored_is_a_422(control: Any) -> None:
    task = {"id": "t1", "suite": "sums", "split": "train", "payload": {"answer": 2**70}}
    refused = control.post("/sessions", json={"task": task})
    assert refused.status_code == 422
    assert refused.json()["error"]["param"] == "task"


def test_rewards_are_kept_exactly_and_late_ones_are_welcome(bench: Any, control: Any) -> None:
    made = control.post("/sessions", json={}).json()
    value = 0.1 + 0.2
    assert control.post(f"/sessions/{made['id']}/seal", json={"outcome": "timeout"}).json()[
        "outcome"
    ] == ("timeout")
    reward = {"name": "score", "value": value}
    assert control.post(f"/sessions/{made['id']}/rewards", json=reward).status_code == 201
    claimed = control.post(f"/sessions/{made['id']}/rewards", json=reward | {"source": "verifier"})
    assert claimed.status_code == 422
    (kept,) = bench.reader.rewards(made["id"])
    assert (kept.value, kept.turn, kept.source) == (value, None, "operator")
    nan = control.post(f"/sessions/{made['id']}/rewards", content=b'{"name":"x","value":NaN}')
    assert nan.status_code == 422
    assert control.post("/sessions/ses_nope/rewards", json=reward).status_code == 404


def test_a_reward_of_a_turn_is_one_of_its_call(bench: Any, control: Any, ask: Any) -> None:
    _, at = _asked(bench, control, ask)
    call = bench.call().id
    for place in ({"turn": 1}, {"call_id": call}, {"turn": 1, "call_id": call}):
        told = control.post(at, json={"name": "step", "value": 1.0} | place)
        assert (told.status_code, told.json()["call_id"]) == (201, call)
    kept = [(one.call_id, one.turn) for one in bench.reader.rewards(bench.call().session_id)]
    assert kept == [(call, 1), (call, None), (call, 1)]


def test_a_reward_of_what_the_session_does_not_have_is_refused(
    bench: Any, control: Any, ask: Any
) -> None:
    empty = control.post("/sessions", json={}).json()["id"]
    mine, at = _asked(bench, control, ask)
    others, _ = _asked(bench, control, ask)
    own, foreign = (bench.reader.call_ids(session)[0] for session in (mine, others))
    for path, place, status, param, says in (
        (at, {"turn": 2}, 404, "turn", "has turns 1 to 1, not 2"),
        (at, {"turn": 0}, 404, "turn", "has turns 1 to 1, not 0"),
        (at, {"turn": 2, "call_id": own}, 404, "turn", "has turns 1 to 1, not 2"),
        (at, {"call_id": foreign}, 404, "call_id", f"has no call {foreign}"),
        (at, {"turn": 1, "call_id": foreign}, 404, "call_id", f"has no call {foreign}"),
        (f"/sessions/{empty}/rewards", {"turn": 1}, 404, "turn", "has no turn yet"),
    ):
        refused = control.post(path, json={"name": "step", "value": 1.0} | place)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (status, param)
        assert error["message"].endswith(says)
    assert all(not bench.reader.rewards(session) for session in (empty, mine, others))


def test_a_reward_that_names_two_calls_is_refused(bench: Any, control: Any, ask: Any) -> None:
    session, at = _asked(bench, control, ask)
    httpx.post(f"{bench.url}/s/{session}{CHAT}", json=ask).raise_for_status()
    first, second = bench.reader.call_ids(session)
    both = {"name": "step", "value": 1.0, "turn": 2, "call_id": first}
    refused = control.post(at, json=both)
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "turn")
    assert second in refused.json()["error"]["message"]


def test_a_role_and_a_branch_are_places_and_a_reward_has_one(
    bench: Any, control: Any, ask: Any
) -> None:
    session, at = _asked(bench, control, ask)
    (call,) = bench.reader.call_ids(session)
    for place in ({"role": "planner"}, {"branch": call}):
        made = control.post(at, json={"name": "own", "value": 1.0, "kind": "success", **place})
        assert made.status_code == 201
        assert made.json() | place | {"kind": "success"} == made.json()
    kept = [one.place for one in bench.reader.rewards(session)]
    assert kept == [("planner", None, None), (None, call, None)]
    own = {"name": "own", "value": 1.0}
    for place, status in (
        ({"branch": "c_nope"}, 404),
        ({"role": "planner", "turn": 1}, 422),
        ({"branch": call, "call_id": call}, 422),
    ):
        assert control.post(at, json=own | place).status_code == status


def test_a_scorer_s_reward_is_given_with_the_verifier_key_alone(bench: Any, control: Any) -> None:
    made = control.post("/sessions", json={}).json()
    reward = {"name": "cost", "value": 1.0, "scorer": True}
    at = f"/sessions/{made['id']}/rewards"
    refused = control.post(at, json=reward)
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "scorer")
    key = {"authorization": f"Bearer {made['verifier_key']}"}
    given = control.post(at, json=reward, headers=key)
    assert (given.status_code, given.json()["source"]) == (201, "scorer")


def _asked(bench: Any, control: Any, ask: Any) -> tuple[str, str]:
    """A new session of one call, and where its rewards go."""
    session = control.post("/sessions", json={}).json()["id"]
    httpx.post(f"{bench.url}/s/{session}{CHAT}", json=ask).raise_for_status()
    return session, f"/sessions/{session}/rewards"


def test_a_calls_kind_is_said_and_taken_back(bench: Any, control: Any, ask: Any) -> None:
    made = control.post("/sessions", json={}).json()
    environment = made["environment"]
    openai.OpenAI(
        base_url=environment["OPENAI_BASE_URL"], api_key=environment["OPENAI_API_KEY"]
    ).chat.completions.create(**ask)
    call = bench.call()
    path = f"/sessions/{made['id']}/calls/{call.id}/kind"
    said = control.put(path, json={"kind": "side", "role": "title", "by": "ada"})
    assert said.json() == {"call_id": call.id, "kind": "side", "role": "title", "by": "ada"}
    assert (bench.call().kind_set, bench.call().kind_by) == ("side", "ada")
    (shown,) = control.get(f"/sessions/{made['id']}/calls").json()
    assert (shown["kind"], shown["role"], shown["policy"]) == ("side", "title", "policy")
    assert control.delete(path).json()["kind"] is None
    assert bench.call().kind_set is None
    assert control.put(path, json={"kind": "holiday"}).status_code == 422
    other = control.post("/sessions", json={}).json()
    elsewhere = f"/sessions/{other['id']}/calls/{call.id}/kind"
    assert control.put(elsewhere, json={"kind": "main"}).status_code == 404


def test_a_run_begins_once_and_ends_once(bench: Any, control: Any) -> None:
    asked = {"kind": "rollout", "name": "a shell command"}
    begun = control.put("/runs/run_1", json=asked).json()
    assert (begun["status"], begun["ended_at"]) == ("running", None)
    session = control.post("/sessions", json={"run_id": "run_1"}).json()
    assert bench.reader.session(session["id"]).run_id == "run_1"
    assert control.put("/runs/run_1", json=asked).json() == begun
    ended = control.put("/runs/run_1", json={**asked, "status": "stopped"}).json()
    assert ended["status"] == "stopped"
    assert ended["ended_at"] >= begun["started_at"]
    assert control.put("/runs/run_1", json=asked).json() == ended
    (kept,) = bench.reader.runs("rollout")
    assert (kept.name, kept.status, kept.ended_at) == (
        "a shell command",
        "stopped",
        ended["ended_at"],
    )


@pytest.mark.parametrize(
    ("run", "body"),
    [
        ("run 1", {"kind": "rollout"}),
        ("r" * 65, {"kind": "rollout"}),
        ("run_1", {}),
        ("run_1", {"kind": "rollout", "status": "gone"}),
        ("run_1", {"kind": "rollout", "name": "a\u0000b"}),
    ],
)
def test_a_run_that_cannot_be_stored_is_a_422(
    bench: Any, control: Any, run: str, body: dict[str, Any]
) -> None:
    assert control.put(f"/runs/{run}", json=body).status_code == 422
    assert bench.reader.runs() == []


def test_a_session_is_sealed_without_a_word_as_completed(control: Any) -> None:
    made = control.post("/sessions", json={}).json()
    sealed = control.post(f"/sessions/{made['id']}/seal")
    assert (sealed.status_code, sealed.json()["outcome"]) == (200, "completed")


def test_a_sealed_session_keeps_its_first_outcome(control: Any) -> None:
    made = control.post("/sessions", json={}).json()
    path = f"/sessions/{made['id']}/seal"
    first = control.post(path, json={"outcome": "completed"}).json()
    assert control.post(path, json={"outcome": "error"}).json() == first


def test_each_token_knows_the_policy_version_it_arrived_under(
    bench: Any, stage: Any, control: Any, ask: Any
) -> None:
    told = threading.Event()
    control.put("/policy", json={"version": 3})
    stage.play = lambda _: ScriptedReply("The answer is four.", fault=Stall(30, 2, told))
    text = b""
    with httpx.stream("POST", bench.url + CHAT, json=ask | {"stream": True}) as response:
        for piece in response.iter_raw():
            text += piece
            if b"answer" in piece:
                control.put("/policy", json={"version": 4})
                told.set()
    (sampled,) = bench.reader.sampled(bench.call().id)
    assert [(run.start, run.version) for run in sampled.versions] == [(0, 3), (2, 4)]
    assert (bench.call().version_start, bench.call().version_end) == (3, 4)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_whole_reply_that_a_publish_came_into_says_so(
    stage: Any, start_proxy: Any, ask: Any, until: Any, streamed: bool
) -> None:
    bench = start_proxy(stage.engine.base_url, stream_upstream=streamed)
    policy = f"{bench.url}/bridle/v1/policy"
    told = threading.Event()
    httpx.put(policy, json={"version": 3})
    stage.play = lambda _: ScriptedReply("The answer is four.", fault=Stall(30, 2, told))
    asking = threading.Thread(target=lambda: httpx.post(bench.url + CHAT, json=ask))
    asking.start()
    until(lambda: len(stage.requests) == 1)
    if streamed:
        time.sleep(0.2)  # for the two tokens before it
    httpx.put(policy, json={"version": 4})
    told.set()
    asking.join(10)
    (sampled,) = bench.reader.sampled(bench.call().id)
    runs = [(run.start, run.version) for run in sampled.versions]
    assert runs == ([(0, 3), (2, 4)] if streamed else [(0, 4)])
    notes = [(note.name, note.detail) for note in bench.call().notes]
    assert notes == ([] if streamed else [("version_changed_midway", "3 4")])


def test_a_version_never_goes_back(control: Any) -> None:
    assert control.put("/policy", json={"version": 5}).status_code == 200
    assert control.put("/policy", json={"version": 4}).status_code == 409
    assert control.get("/policy").json()["version"] == 5


def test_while_paused_new_calls_wait_and_running_ones_finish(
    bench: Any, stage: Any, control: Any, ask: Any, until: Any
) -> None:
    over = threading.Event()
    stage.play = lambda _: ScriptedReply("The answer is four.", fault=Stall(30, 1, over))
    replies: list[int] = []

    def call() -> None:
        replies.append(httpx.post(bench.url + CHAT, json=ask).status_code)

    running = threading.Thread(target=call)
    running.start()
    until(lambda: control.get("/policy").json()["running"] == 1)
    threading.Timer(0.2, over.set).start()
    state = control.post("/pause", json={"mode": "drain", "timeout_s": 10}).json()
    assert (state["paused"], state["running"]) == (True, 0)

    waiting = threading.Thread(target=call)
    waiting.start()
    until(lambda: control.get("/policy").json()["waiting"] == 1)
    assert len(stage.requests) == 1
    control.post("/resume")
    for thread in (running, waiting):
        thread.join(10)
    assert replies == [200, 200]


def test_a_client_that_leaves_while_waiting_at_the_gate_is_not_sent_to_the_engine(
    bench: Any, stage: Any, control: Any, ask: Any, until: Any
) -> None:
    control.post("/pause", json={"mode": "span"})
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(bench.url + CHAT, json=ask, timeout=1.0)
    until(lambda: control.get("/policy").json()["waiting"] == 0)
    control.post("/resume")
    assert httpx.post(bench.url + CHAT, json=ask).status_code == 200
    assert len(stage.requests) == 1


def test_metrics_count_calls_tokens_and_named_events(bench: Any, ask: Any) -> None:
    httpx.post(bench.url + CHAT, json=ask | {"service_tier": "auto"})
    httpx.post(bench.url + CHAT, content=b"{")
    text = httpx.get(bench.url + "/metrics").text
    assert 'bridle_calls_total{dialect="chat",status="complete"} 1.0' in text
    assert 'bridle_events_total{name="field_dropped"} 1.0' in text
    assert 'bridle_refused_requests_total{dialect="chat",kind="invalid_request"} 1.0' in text
    assert "bridle_sampled_tokens_total 6.0" in text


def test_the_time_of_a_call_lasts_until_its_record_is_committed(bench: Any, ask: Any) -> None:
    chat = f"{bench.url}/s/known{CHAT}"
    httpx.post(chat, json=ask)
    with closing(sqlite3.connect(bench.store_path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        thread = threading.Thread(target=httpx.post, args=(chat,), kwargs={"json": ask})
        thread.start()
        thread.join(1.0)
        other.execute("ROLLBACK")
        thread.join(10)
    text = httpx.get(bench.url + "/metrics").text
    assert "bridle_call_seconds_count 2.0" in text
    taken = re.search(r"bridle_call_seconds_sum (\S+)", text)
    assert taken is not None
    assert float(taken[1]) > 0.5


def test_a_call_has_begun_when_its_prompt_is_made(
    stage: Any, start_proxy: Any, model_dir: Path, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[float] = []
    make = Continuer.prompt

    def slowly(*asked: Any) -> Any:
        prompt = make(*asked)
        time.sleep(0.2)
        made.append(time.time())
        return prompt

    monkeypatch.setattr(Continuer, "prompt", slowly)
    bench = start_proxy(stage.engine.base_url, tokenizer_dir=model_dir)
    httpx.post(bench.url + CHAT, json=ask)
    assert made[-1] - bench.call().started_at >= 0.2


@pytest.mark.parametrize(
    ("method", "path", "status", "told", "allow"),
    [
        ("GET", "/bridle/v1/nope", 404, "nothing is served at /bridle/v1/nope", None),
        ("PUT", "/bridle/v1/pause", 405, "PUT is not served at /bridle/v1/pause", "POST"),
        (
            "PUT",
            "/bridle/v1/sessions",
            405,
            "PUT is not served at /bridle/v1/sessions",
            "GET, POST",
        ),
        ("POST", "/bridle/v1/policy", 405, "POST is not served at /bridle/v1/policy", "GET, PUT"),
        ("POST", "/healthz", 405, "use GET here", "GET, HEAD"),
    ],
)
def test_what_the_control_api_does_not_serve_is_told_in_its_own_shape(
    bench: Any, method: str, path: str, status: int, told: str, allow: str | None
) -> None:
    response = httpx.request(method, bench.url + path)
    assert response.status_code == status
    assert response.json()["error"]["message"] == told
    assert response.headers.get("allow") == allow


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/sessions/{}/rewards", {"name": "a", "value": True}, "value"),
        ("/sessions/{}/rewards", {"name": "a", "value": 1, "turn": True}, "turn"),
        ("/pause", {"timeout_s": False}, "timeout_s"),
    ],
)
def test_a_boolean_is_no_number(bench: Any, path: str, body: dict[str, object], param: str) -> None:
    session = httpx.post(f"{bench.url}/bridle/v1/sessions", json={}).json()["id"]
    refused = httpx.post(f"{bench.url}/bridle/v1{path.format(session)}", json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (422, param)
    assert error["message"] == "a number is needed, not a boolean"


def test_a_body_that_is_no_json_is_told_so_and_not_its_offset(bench: Any) -> None:
    said = {"content-type": "application/json"}
    response = httpx.post(bench.url + "/bridle/v1/sessions", content=b'{"name":', headers=said)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (422, None)
    assert error["message"].startswith("the body is not JSON: ")


def test_the_api_describes_itself(bench: Any) -> None:
    paths = httpx.get(bench.url + "/openapi.json").json()["paths"]
    assert "/bridle/v1/sessions/{session_id}/rewards" in paths


def test_the_api_says_what_its_fields_are(bench: Any) -> None:
    told = httpx.get(bench.url + "/openapi.json").json()["components"]["schemas"]
    assert "counted from 1" in told["NewReward"]["properties"]["turn"]["description"]
    assert told["EngineView"]["properties"]["changes"]["description"]
    assert "description" not in told["OpenedSession"]


def test_what_may_have_failed_an_agent_is_told_unless_it_is_the_agents_own(
    raw_engine: Any, start_proxy: Any, ask: Any
) -> None:
    bench = start_proxy(raw_engine.base_url, model="m")
    made = httpx.post(f"{bench.url}/bridle/v1/sessions", json={}).json()
    headers = {"authorization": f"Bearer {made['key']}"}

    def fault(proxy: str) -> str | None:
        told: str | None = httpx.get(f"{proxy}/bridle/v1/sessions/{made['id']}").json()["fault"]
        return told

    def fault_after(status: int, said: str) -> str | None:
        async def answer(_: Any, send: Any) -> None:
            body = json.dumps({"error": {"message": said}}).encode()
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": body})

        raw_engine.answer = answer
        httpx.post(bench.url + CHAT, json=ask, headers=headers)
        return fault(bench.url)

    assert fault(bench.url) is None
    assert fault_after(500, "no") == "upstream_error"
    assert fault_after(400, "top_p must be in (0, 1]") is None
    assert fault_after(400, "This model's maximum context length is 8 tokens.") is None
    assert fault_after(503, "no") == "overloaded"
    restarted = start_proxy(raw_engine.base_url, model="m")
    assert fault(restarted.url) == "proxy_restarted"
    httpx.post(f"{bench.url}/bridle/v1/sessions/{made['id']}/seal", json={})
    assert fault(restarted.url) == "overloaded"


def test_a_client_that_got_no_token_and_left_may_have_waited_for_too_long(
    bench: Any, stage: Any, control: Any, ask: Any, until: Any
) -> None:
    made = control.post("/sessions", json={}).json()
    headers = {"authorization": f"Bearer {made['key']}"}
    over = threading.Event()
    stage.play = lambda _: ScriptedReply("told too late", fault=Stall(30, 0, over))
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(bench.url + CHAT, json=ask, headers=headers, timeout=0.5)

    def told() -> Any:
        return control.get(f"/sessions/{made['id']}").json()["fault"]

    until(lambda: told() == "client_disconnected")
    stage.play = lambda _: ScriptedReply("The answer is four.", fault=Stall(30, 2, over))
    with httpx.stream(
        "POST", bench.url + CHAT, json=ask | {"stream": True}, headers=headers
    ) as reply:
        next(reply.iter_lines())
    until(lambda: bench.calls()[-1].status == "partial")
    assert told() is None
    over.set()
