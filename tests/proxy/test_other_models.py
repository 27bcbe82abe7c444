"""Models beside the policy: aliases, roles, frozen engines and external providers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from bridle.engine.scripted import ScriptedEngine, ScriptedReply
from bridle.proxy.settings import OtherModel, ProxySettings
from bridle.reconstruct.audit import audit
from bridle.reconstruct.episodes import episode_of
from bridle.reconstruct.session import LoadedSession
from bridle.store.records import BreakReason, CallStatus

MODEL = "tiny-policy"
CHAT = "/v1/chat/completions"

http = httpx.Client(timeout=60, trust_env=False)


@pytest.fixture
def frozen(model_dir: Path) -> Iterator[ScriptedEngine]:
    with ScriptedEngine(
        model_dir, lambda _: ScriptedReply("I am frozen."), served_model_name="judge-7b"
    ) as engine:
        yield engine


def ask(url: str, session: str, model: str, messages: Any = None, **headers: str) -> Any:
    body = {"model": model, "messages": messages or [{"role": "user", "content": "who?"}]}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    reply = http.post(f"{url}/s/{session}{CHAT}", json=body, headers=named)
    reply.raise_for_status()
    return reply.json()


def note_names(call: Any) -> set[str]:
    return {note.name for note in call.notes}


def sound(bench: Any) -> None:
    found = list(audit(bench.reader, bodies=True))
    assert found
    assert not [violation for one in found for violation in one.violations]


def test_a_frozen_model_answers_by_its_name_and_is_never_trained(
    stage: Any, start_proxy: Any, frozen: Any
) -> None:
    others = {"*-haiku-*": OtherModel((frozen.base_url,)), "judge": OtherModel((frozen.base_url,))}
    bench = start_proxy(stage.engine.base_url, other_models=others)
    for model in ("claude-haiku-4", "judge"):
        reply = ask(bench.url, "lamp", model)
        assert reply["choices"][0]["message"]["content"] == "I am frozen."
        assert reply["model"] == model
    assert ask(bench.url, "lamp", "claude-opus-9")["choices"][0]["message"]["content"] == (
        "The answer is four."
    )
    first, second, own = bench.calls()
    for call in (first, second):
        assert call.status is CallStatus.COMPLETE
        assert call.model_served == "judge-7b"
        assert call.sampled_tokens
        assert "model_frozen" in note_names(call)
    assert "model_frozen" not in note_names(own)
    episode = episode_of(LoadedSession.load(bench.reader, own.session_id))
    assert episode.conservation.trained == own.sampled_tokens
    assert dict(episode.conservation.dropped) | dict(episode.conservation.masked) == {
        "model_frozen": first.sampled_tokens + second.sampled_tokens
    }
    assert "judge" in {card["id"] for card in http.get(f"{bench.url}/v1/models").json()["data"]}
    sound(bench)


def test_sub_agents_can_be_sent_to_another_model(stage: Any, start_proxy: Any, frozen: Any) -> None:
    bench = start_proxy(
        stage.engine.base_url,
        other_models={"judge": OtherModel((frozen.base_url,))},
        role_models={"subagent": "judge"},
    )
    agent = {"x_claude_code_agent_id": "explorer-1", "x_claude_code_session_id": "s"}
    told = ask(bench.url, "lamp", "claude-opus", **agent)
    assert told["choices"][0]["message"]["content"] == "I am frozen."
    told = ask(bench.url, "lamp", "claude-opus", x_claude_code_session_id="s")
    assert told["choices"][0]["message"]["content"] == "The answer is four."
    sub, main = bench.calls()
    assert (sub.role, "model_frozen" in note_names(sub)) == ("explorer-1", True)
    assert "model_frozen" not in note_names(main)


def test_a_role_may_be_sent_to_no_model_that_is_not_there() -> None:
    """Its calls would go to the policy."""
    others = {"judge-*": OtherModel(("http://127.0.0.1:8",))}
    here = partial(ProxySettings, "http://127.0.0.1:9", "s.db", other_models=others)
    here(role_models={"subagent": "judge-1"})
    with pytest.raises(ValueError, match="subagent=jugde-1: no policy or other model is jugde-1"):
        here(role_models={"subagent": "jugde-1"})


def test_the_policy_does_not_continue_a_frozen_models_ids(
    stage: Any, start_proxy: Any, frozen: Any, model_dir: Path
) -> None:
    """They may be another vocabulary's; also after a restart."""
    settings = {
        "other_models": {"judge": OtherModel((frozen.base_url,))},
        "tokenizer_dir": model_dir,
    }
    bench = start_proxy(stage.engine.base_url, **settings)
    messages = [{"role": "user", "content": "who?"}]
    messages.append(ask(bench.url, "lamp", "judge", messages)["choices"][0]["message"])
    messages.append({"role": "user", "content": "and you?"})
    ask(bench.url, "lamp", "opus", messages)
    bench.server.stop()
    again = start_proxy(stage.engine.base_url, **settings)
    ask(again.url, "lamp", "opus", messages)
    judge, first, second = again.calls()
    assert (first.parent_call_id, second.parent_call_id) == (judge.id, judge.id)
    assert first.break_reason is BreakReason.PARENT_WITHOUT_IDS
    assert second.break_reason is BreakReason.PARENT_WITHOUT_IDS
    sound(again)


def test_a_tagged_model_is_found_by_its_name(stage: Any, start_proxy: Any) -> None:
    bench = start_proxy(
        stage.engine.base_url, other_models={"qwen3:8b": OtherModel((stage.engine.base_url,))}
    )
    client = openai.OpenAI(base_url=f"{bench.url}/v1", api_key="x", max_retries=0)
    assert client.models.retrieve("qwen3:8b").id == "qwen3:8b"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("qwen3:4b")
    # A method of Google's that is not served is no model either.
    unknown = http.post(f"{bench.url}/v1beta/models/{MODEL}:embedContent", json={})
    assert unknown.status_code == 404
    assert unknown.json()["error"]["status"] == "NOT_FOUND"


KEY = "sk-theirs-0123456789abcdef"


def provider(raw_engine: Any) -> None:
    """A provider that knows no token ids and refuses fields that are not its API's."""
    whole = {
        "id": "x",
        "model": "gpt-9-2026",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "From afar."},
                "logprobs": {"content": [{"token": "From", "logprob": -0.5, "top_logprobs": []}]},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 9, "completion_tokens": 3},
    }

    async def answer(_receive: Any, send: Any) -> None:
        asked = json.loads(raw_engine.bodies[-1])
        ours = {"return_token_ids", "kv_transfer_params", "top_k", "chat_template_kwargs"}
        odd = ours & asked.keys() or any("reasoning" in m for m in asked.get("messages", ()))
        status, body = (400, {"error": {"message": f"unknown: {odd}"}}) if odd else (200, whole)
        kind = b"application/json"
        data = json.dumps(body).encode()
        if asked.get("stream") and not odd:
            kind = b"text/event-stream"
            choice = dict(whole["choices"][0])  # type: ignore[index]
            choice["delta"] = choice.pop("message")
            chunks = [{"choices": [choice]}, {"choices": [], "usage": whole["usage"]}]
            data = b"".join(b"data: %b\n\n" % json.dumps(one).encode() for one in chunks)
            data += b"data: [DONE]\n\n"
        headers = [(b"content-type", kind)]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    raw_engine.answer = answer


@pytest.fixture
def outside(stage: Any, raw_engine: Any, start_proxy: Any) -> Any:
    provider(raw_engine)
    other = OtherModel((raw_engine.base_url + "/v1",), "gpt-9", KEY, external=True)
    return start_proxy(stage.engine.base_url, other_models={"gpt-*": other})


@pytest.mark.parametrize("stream", [False, True])
def test_an_external_provider_is_recorded_whole_and_clearly_without_ids(
    outside: Any, raw_engine: Any, stream: bool
) -> None:
    client = openai.OpenAI(base_url=f"{outside.url}/s/lamp/v1", api_key="mine")
    request: dict[str, Any] = {"model": "gpt-5", "logprobs": True, "extra_body": {"top_k": 4}}
    messages: Any = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hi.", "reasoning": "greet"},
        {"role": "user", "content": "and?"},
    ]
    if stream:
        chunks = list(client.chat.completions.create(messages=messages, stream=True, **request))
        said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        model = chunks[0].model
    else:
        reply = client.chat.completions.create(messages=messages, **request)
        said, model = reply.choices[0].message.content or "", reply.model
    assert (said, model) == ("From afar.", "gpt-5")
    call = outside.call()
    assert (call.status, call.sampled_tokens or 0) == (CallStatus.COMPLETE, 0)
    assert {"no_token_ids", "model_frozen", "sampling_not_forwarded"} <= note_names(call)
    assert call.usage["completion_tokens"] == 3
    assert call.replies[0].content == "From afar."
    assert raw_engine.headers[-1][b"authorization"] == f"Bearer {KEY}".encode()
    assert json.loads(raw_engine.bodies[-1])["model"] == "gpt-9"
    assert KEY.encode() not in outside.store_path.read_bytes()
    sound(outside)


def test_a_budget_of_tokens_goes_by_the_usage_that_an_external_provider_reports(
    outside: Any,
) -> None:
    made = http.post(
        f"{outside.url}/bridle/v1/sessions", json={"settings": {"budget": {"tokens": 4}}}
    ).json()
    body = {"model": "gpt-5", "messages": [{"role": "user", "content": "hi"}]}
    url = made["base_urls"]["openai"] + "/chat/completions"
    assert [http.post(url, json=body).status_code for _ in range(3)] == [200, 200, 429]


def test_an_external_provider_serves_every_dialect(outside: Any) -> None:
    said = anthropic.Anthropic(base_url=outside.url, api_key="x").messages.create(
        model="gpt-5", max_tokens=64, messages=[{"role": "user", "content": "hi"}]
    )
    assert said.content[0].text == "From afar."  # type: ignore[union-attr]
    told = openai.OpenAI(base_url=f"{outside.url}/v1", api_key="x").responses.create(
        model="gpt-5", input="hi"
    )
    assert told.output_text == "From afar."
