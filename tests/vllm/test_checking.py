"""Each start-up check passes on an engine that keeps the contract, and fails on one that does not.

The engine is the embedded one; a relay in front of it breaks one promise at a time, in whole
replies and in streams alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bridle.engine.embedded import EmbeddedEngine
from bridle.engine.serve.transport import ServerThread
from bridle.engine.vllm import Check, Expectation, check_engine
from bridle.engine.vllm.checks import failures
from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.recipes.models.tiny_tokenizer import train_tokenizer

Body = dict[str, Any]
Answer = tuple[int, Any]
Tamper = Callable[[str, Body, Answer], Answer]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEngine]:
    directory = tmp_path_factory.mktemp("checking") / "model"
    size = train_tokenizer(directory, ["what is promised and what is kept"] * 4, vocab_size=320)
    shape = TinyShape(hidden=32, layers=1, heads=1, kv_heads=1, intermediate=64, context=512)
    make_policy(directory, shape, vocab_size=size, seed=3)
    with EmbeddedEngine(directory) as running:
        yield running


class Relay:
    """Passes requests on, and the answers back through :attr:`tamper`."""

    def __init__(self, upstream: str) -> None:
        self.tamper: Tamper = lambda _path, _body, answer: answer
        self._http = httpx.AsyncClient(base_url=upstream, trust_env=False, timeout=30)
        routes = [Route("/{path:path}", self.handle, methods=["GET", "POST"])]
        self.server = ServerThread(Starlette(routes=routes), host="127.0.0.1", port=0)

    async def handle(self, request: Request) -> Response:
        raw = await request.body()
        sent: Body = json.loads(raw) if raw else {}
        path = request.url.path
        upstream = await self._http.request(
            request.method, path, content=raw, params=dict(request.query_params)
        )
        if upstream.headers.get("content-type", "").startswith("text/event-stream"):
            events = []
            for line in upstream.text.splitlines():
                if line.startswith("data: {"):
                    _, event = self.tamper(path, sent, (200, json.loads(line[6:])))
                    line = f"data: {json.dumps(event)}"
                events.append(line)
            return Response("\n".join(events) + "\n", media_type="text/event-stream")
        try:
            answer = (upstream.status_code, upstream.json())
        except ValueError:
            answer = (upstream.status_code, upstream.text)
        status, body = self.tamper(path, sent, answer)
        if isinstance(body, str):
            return Response(body, status)
        return Response(json.dumps(body), status, media_type="application/json")


@pytest.fixture(scope="module")
def relay(engine: EmbeddedEngine) -> Iterator[Relay]:
    relay = Relay(engine.base_url)
    relay.server.start()
    yield relay
    relay.server.stop()


def named(checks: list[Check], name: str) -> Check:
    return next(check for check in checks if check.name == name)


def choices(answer: Any) -> list[Body]:
    return answer.get("choices", []) if isinstance(answer, dict) else []


def test_an_engine_that_keeps_the_contract_fails_nothing(engine: EmbeddedEngine) -> None:
    checks = check_engine(engine.base_url, expect=Expectation(context=256))
    assert failures(checks) == []
    passed = {check.name for check in checks if check.outcome == "ok"}
    assert {
        "serves",
        "context",
        "token ids",
        "streamed token ids",
        "exact continuation",
        "logprobs mode",
        "sampling defaults",
        "prefix cache",
        "control routes",
        "control closed",
    } <= passed


def without_ids(path: str, sent: Body, answer: Answer) -> Answer:
    for choice in choices(answer[1]):
        choice["token_ids"] = None
    return answer


def without_prompt_ids(path: str, sent: Body, answer: Answer) -> Answer:
    if isinstance(answer[1], dict):
        answer[1].pop("prompt_token_ids", None)
    return answer


def one_logprob_short(path: str, sent: Body, answer: Answer) -> Answer:
    for choice in choices(answer[1]):
        if choice.get("finish_reason") and choice.get("logprobs"):
            choice["logprobs"]["content"] = choice["logprobs"]["content"][:-1]
    return answer


def a_lost_logprob(path: str, sent: Body, answer: Answer) -> Answer:
    for choice in choices(answer[1]):
        for entry in (choice.get("logprobs") or {}).get("content") or []:
            entry["logprob"] = -9999.0
    return answer


def wrong_usage(path: str, sent: Body, answer: Answer) -> Answer:
    if isinstance(answer[1], dict) and answer[1].get("usage"):
        answer[1]["usage"]["completion_tokens"] += 1
    return answer


def other_ids_when_streamed(path: str, sent: Body, answer: Answer) -> Answer:
    for choice in choices(answer[1]):
        if sent.get("stream") and choice.get("token_ids"):
            choice["token_ids"] = [1] * len(choice["token_ids"])
    return answer


def an_echo_that_is_not_what_was_sent(path: str, sent: Body, answer: Answer) -> Answer:
    if "kv_transfer_params" in sent and answer[1].get("prompt_token_ids"):
        answer[1]["prompt_token_ids"] = answer[1]["prompt_token_ids"][:-1]
    return answer


def an_echo_without_use(path: str, sent: Body, answer: Answer) -> Answer:
    if "kv_transfer_params" in sent:
        for choice in choices(answer[1]):
            choice["token_ids"] = [(each + 1) for each in choice.get("token_ids") or []]
    return answer


def raw_logprobs(path: str, sent: Body, answer: Answer) -> Answer:
    for choice in choices(answer[1]):
        for entry in (choice.get("logprobs") or {}).get("content") or []:
            for top in [entry, *entry["top_logprobs"]]:
                top["logprob"] *= sent.get("temperature") or 1.0
    return answer


def logits(path: str, sent: Body, answer: Answer) -> Answer:
    for choice in choices(answer[1]):
        for entry in (choice.get("logprobs") or {}).get("content") or []:
            for top in [entry, *entry["top_logprobs"]]:
                top["logprob"] += 20.0
    return answer


def no_top_logprobs(path: str, sent: Body, answer: Answer) -> Answer:
    for choice in choices(answer[1]):
        for entry in (choice.get("logprobs") or {}).get("content") or []:
            entry["top_logprobs"] = []
    return answer


def defaults_of_its_own(path: str, sent: Body, answer: Answer) -> Answer:
    if path == "/v1/completions" and "temperature" not in sent:
        for choice in choices(answer[1]):
            choice["token_ids"] = [0] * len(choice.get("token_ids") or [])
    return answer


def no_prefix_cache(path: str, sent: Body, answer: Answer) -> Answer:
    if isinstance(answer[1], dict) and (answer[1].get("usage") or {}).get("prompt_tokens_details"):
        answer[1]["usage"]["prompt_tokens_details"]["cached_tokens"] = 0
    return answer


def no_control_routes(path: str, sent: Body, answer: Answer) -> Answer:
    return (404, {"detail": "Not Found"}) if path == "/is_paused" else answer


def paused(path: str, sent: Body, answer: Answer) -> Answer:
    return (200, {"is_paused": True}) if path == "/is_paused" else answer


def an_old_vllm(path: str, sent: Body, answer: Answer) -> Answer:
    return (200, {"version": "0.11.2"}) if path == "/version" else answer


def no_models(path: str, sent: Body, answer: Answer) -> Answer:
    return (200, {"data": []}) if path == "/v1/models" else answer


def unhealthy(path: str, sent: Body, answer: Answer) -> Answer:
    return (503, {}) if path == "/health" else answer


def another_shape(path: str, sent: Body, answer: Answer) -> Answer:
    return (200, {"choices": [["a", "list"]]}) if path.startswith("/v1/c") else answer


def errors(path: str, sent: Body, answer: Answer) -> Answer:
    failed = (500, {"error": {"message": "it broke"}})
    return failed if path == "/v1/chat/completions" else answer


@pytest.mark.parametrize(
    ("tamper", "name", "words"),
    [
        (without_ids, "token ids", "no token_ids came back: vLLM 0.32 or newer"),
        (without_prompt_ids, "token ids", "no prompt_token_ids came back"),
        (one_logprob_short, "token ids", "8 ids, 7 logprobs, usage says 8"),
        (a_lost_logprob, "token ids", "a sampled token has no logprob"),
        (wrong_usage, "streamed token ids", "8 ids, 8 logprobs, usage says 9"),
        (other_ids_when_streamed, "streamed token ids", "gave other ids streamed than whole"),
        (an_echo_that_is_not_what_was_sent, "exact continuation", "came back changed"),
        (an_echo_without_use, "exact continuation", "echoed, but not what was continued"),
        (raw_logprobs, "logprobs mode", "they are raw: serve with --logprobs-mode"),
        (logits, "logprobs mode", "they are logits: serve with --logprobs-mode"),
        (no_top_logprobs, "logprobs mode", "no top_logprobs came back"),
        (defaults_of_its_own, "sampling defaults", "serve with --generation-config vllm"),
        (no_prefix_cache, "prefix cache", "serve with --enable-prefix-caching"),
        (no_control_routes, "control routes", "VLLM_SERVER_DEV_MODE=1"),
        (paused, "control routes", "the engine is paused and would answer nothing"),
        (an_old_vllm, "serves", "vLLM 0.11.2: at least 0.32 is needed"),
        (no_models, "serves", "lists no model"),
        (unhealthy, "serves", "/health answers 503"),
        (another_shape, "token ids", "has not the contract's shape"),
        (errors, "token ids", "answered 500: it broke: see the engine's log"),
    ],
)
def test_a_broken_promise_is_one_line_with_its_remedy(
    relay: Relay, tamper: Tamper, name: str, words: str
) -> None:
    relay.tamper = tamper
    check = named(check_engine(relay.server.base_url), name)
    assert check.outcome == "failed"
    assert words in check.line
    assert "\n" not in check.line


def test_an_engine_that_is_not_there_is_one_result() -> None:
    (check,) = check_engine("http://127.0.0.1:9", expect=Expectation(timeout=2.0))
    assert (check.name, check.outcome) == ("serves", "failed")
    assert check.remedy == "is an engine running at http://127.0.0.1:9?"


def test_a_context_that_is_too_short_fails(engine: EmbeddedEngine) -> None:
    check = named(check_engine(engine.base_url, expect=Expectation(context=10_000)), "context")
    assert check.line.endswith("512 tokens, 10000 are needed: serve with --max-model-len 10000")


def as_vllm(settings: Body, metrics: str = "") -> Tamper:
    """The embedded engine posing as a vLLM with these settings."""

    def tamper(path: str, sent: Body, answer: Answer) -> Answer:
        if path == "/version":
            return 200, {"version": "0.32.0"}
        if path == "/server_info":
            return 200, {"vllm_config": settings}
        if path == "/metrics":
            return 200, metrics
        if path == "/v1/chat/completions" and "tools" in sent:
            return 400, {"error": {"message": "this one takes none"}}
        return no_details(path, sent, answer)

    return tamper


def no_details(path: str, sent: Body, answer: Answer) -> Answer:
    if isinstance(answer[1], dict) and answer[1].get("usage"):
        answer[1]["usage"]["prompt_tokens_details"] = None
    return answer


@pytest.mark.parametrize(
    ("settings", "name", "outcome", "words"),
    [
        ({"model_config": {"generation_config": "auto"}}, "sampling defaults", "failed", "files"),
        (
            {"structured_outputs_config": {"reasoning_parser": "qwen3"}},
            "reasoning",
            "failed",
            "serve with --set reasoning_parser=bridle_thinking",
        ),
        (
            {},
            "tool calls",
            "failed",
            "refused: this one takes none: give `bridle engine vllm` --set tool_parser=hermes, "
            "or vLLM --enable-auto-tool-choice --tool-call-parser hermes",
        ),
        (
            {"device_config": {"device": "cpu"}, "scheduler_config": {"enable_chunked_prefill": 1}},
            "weight reloads",
            "failed",
            "--no-enable-chunked-prefill",
        ),
        (
            {"device_config": {"device": "cpu"}, "parallel_config": {"worker_cls": "vllm.Own"}},
            "weight reloads",
            "failed",
            "--worker-cls bridle_worker.BridleWorker",
        ),
        ({"device_config": {"device": "cuda"}}, "weight reloads", "ok", "verified by scoring"),
        ({"weight_transfer_config": {"backend": "bridle"}}, "weight transfers", "ok", "taken from"),
        ({"weight_transfer_config": None}, "weight transfers", "ok", "not taken; weights are"),
        ({}, "prefix cache", "unknown", "does not say what it reuses"),
    ],
)
def test_settings_of_a_vllm_are_judged_where_nothing_else_shows_them(
    relay: Relay, settings: Body, name: str, outcome: str, words: str
) -> None:
    relay.tamper = as_vllm(settings)
    check = named(check_engine(relay.server.base_url), name)
    assert check.outcome == outcome
    assert words in check.line


def test_prefix_cache_hits_are_read_from_metrics_when_usage_is_silent(relay: Relay) -> None:
    counts = iter((10.0, 410.0))
    answer = as_vllm({})

    def tamper(path: str, sent: Body, given: Answer) -> Answer:
        if path == "/metrics":
            return 200, f'vllm:prefix_cache_hits_total{{engine="0"}} {next(counts)}\n'
        return answer(path, sent, given)

    relay.tamper = tamper
    check = named(check_engine(relay.server.base_url), "prefix cache")
    assert check.detail == "400 of 504 prompt tokens reused"


def test_control_routes_that_answer_off_loopback_fail(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bridle.engine.vllm import checks

    # Our engine refuses such requests; vLLM does not.
    monkeypatch.setattr("bridle.engine.serve.server.NoWebPages", lambda app, **_options: app)
    others = checks._own_addresses()
    if not others:
        pytest.skip("this machine has no address but loopback")
    with EmbeddedEngine(Path(engine.backend.tokenizer.directory), host="0.0.0.0") as open_engine:  # noqa: S104
        port = open_engine.base_url.rpartition(":")[2]
        url = f"http://127.0.0.1:{port}"
        check = named(check_engine(url), "control closed")
        assert check.outcome == "failed"
        assert "serve with --host 127.0.0.1" in check.line
        trusting = check_engine(url, expect=Expectation(private_network=True))
        assert named(trusting, "control closed").outcome == "unknown"
        remote = check_engine(f"http://{others[0]}:{port}")
        assert named(remote, "control closed").outcome == "failed"
