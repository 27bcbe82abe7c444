"""No 5xx from bad input: the control API by its own OpenAPI, the dialects by mutated bodies.

A short run by default, 10,000 bodies per route behind the marker ``long``.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from bridle.engine.scripted import ScriptedEngine, ScriptedReply
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import Limits, ProxySettings

pytestmark = pytest.mark.loop

SHORT, LONG = 100, 10_000

Json = Any
http = httpx.Client(timeout=60, trust_env=False)


@pytest.fixture(scope="module")
def target(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A proxy of its own: fuzzing pauses it, seals its sessions and moves its policy."""
    store = tmp_path_factory.mktemp("fuzz") / "bridle.db"
    with ScriptedEngine(
        model_dir, lambda _: ScriptedReply("four"), served_model_name="m"
    ) as engine:
        limits = Limits(health_check_s=0)
        proxy = ProxyServer(ProxySettings(engine.base_url, str(store), limits=limits), grace_s=1)
        with proxy:
            yield proxy.base_url


def runs(count: int) -> settings:
    slow = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)
    return settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=slow,
        database=None,
        phases=(Phase.generate,),
        derandomize=count <= SHORT,
    )


def control_operations(target: str) -> list[Any]:
    schema = schemathesis.openapi.from_url(f"{target}/openapi.json")
    # A new engine is an address that the proxy then asks: arbitrary ones are not for a test.
    schema = schema.exclude(path="/bridle/v1/engines", method="POST")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 12
    return operations


def fuzz_control(target: str, count: int) -> None:
    session = http.post(f"{target}/bridle/v1/sessions", json={}).json()["id"]
    for operation in control_operations(target):
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):

            @runs(count)
            @given(operation.as_strategy(generation_mode=mode), st.booleans())
            def never_a_5xx(case: schemathesis.Case, known: bool) -> None:
                if known and "session_id" in case.path_parameters:
                    case.path_parameters["session_id"] = session
                reply = case.call(base_url=target)
                assert reply.status_code < 500, f"{case.as_curl_command()}\n{reply.text}"

            try:
                never_a_5xx()
            except Unsatisfiable:
                # Nothing can be wrong with the input of an operation that takes none.
                assert mode is schemathesis.GenerationMode.NEGATIVE


@pytest.mark.sampled(0)
def test_the_control_api_answers_bad_input_below_500(target: str) -> None:
    fuzz_control(target, 2)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_control_api_answers_much_bad_input_below_500(target: str) -> None:
    fuzz_control(target, 500)


TOOL = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALLS = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
ROUTES: dict[str, tuple[str, Json]] = {
    "chat": (
        "/v1/chat/completions",
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": None, "tool_calls": CALLS},
                {"role": "tool", "tool_call_id": "c", "content": "3"},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": TOOL}}],
            "tool_choice": "auto",
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "top_logprobs": 1,
            "temperature": 1.0,
            "max_tokens": 8,
            "n": 1,
            "stop": ["x"],
            "response_format": {"type": "text"},
        },
    ),
    "completions": (
        "/v1/completions",
        {"model": "m", "prompt": "hi", "max_tokens": 8, "logprobs": 1, "stream": False, "n": 1},
    ),
    "responses": (
        "/v1/responses",
        {
            "model": "m",
            "instructions": "s",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "o"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": TOOL}],
            "previous_response_id": None,
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "text"}},
            "max_output_tokens": 16,
            "store": True,
            "include": [],
            "stream": True,
        },
    ),
    "messages": (
        "/v1/messages?beta=true",
        {
            "model": "m",
            "max_tokens": 8,
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c", "content": "3"}],
                },
            ],
            "tools": [{"name": "f", "input_schema": TOOL}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "disabled"},
            "stream": True,
        },
    ),
    "count_tokens": (
        "/v1/messages/count_tokens",
        {"model": "m", "messages": [{"role": "user", "content": "a"}]},
    ),
    "google": (
        "/v1beta/models/m:streamGenerateContent?alt=sse",
        {
            "contents": [
                {"role": "user", "parts": [{"text": "a"}]},
                {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {"a": 1}}}]},
                {
                    "role": "user",
                    "parts": [{"functionResponse": {"name": "f", "response": {"o": "3"}}}],
                },
            ],
            "systemInstruction": {"parts": [{"text": "s"}]},
            "tools": [{"functionDeclarations": [{"name": "f", "parameters": TOOL}]}],
            "generationConfig": {"maxOutputTokens": 8, "temperature": 0.5, "stopSequences": ["x"]},
        },
    ),
    "countTokens": (
        "/v1beta/models/m:countTokens",
        {"contents": [{"role": "user", "parts": [{"text": "a"}]}]},
    ),
}

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.sampled_from(["", "\x00", "\ud800", 2**63, -1, 1e308, "auto", "text", "user", "a" * 5000])
)
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(value: Json, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key and index in a body."""
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield (*path, key)
        if isinstance(value[key], (dict, list)):
            yield from places(value[key], (*path, key))


@st.composite
def mutated(draw: st.DrawFn, body: Json) -> bytes:
    """``body`` with one to three places replaced, removed or repeated; sometimes cut in bytes."""
    body = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(body))
        if not found:
            break
        *above, key = draw(st.sampled_from(found))
        parent = body
        for step in above:
            parent = parent[step]
        match draw(st.sampled_from(["replace", "replace", "remove", "repeat"])):
            case "replace":
                parent[key] = draw(anything)
            case "remove":
                del parent[key]
            case _:
                if isinstance(parent, list):
                    parent.append(copy.deepcopy(parent[key]))
                else:
                    parent[draw(st.text(max_size=8))] = copy.deepcopy(parent[key])
    data = json.dumps(body).encode()
    return data[: draw(st.integers(0, len(data)))] if draw(st.integers(0, 19)) == 0 else data


def fuzz_route(target: str, name: str, count: int) -> None:
    path, body = ROUTES[name]
    http.post(f"{target}/bridle/v1/resume")

    @runs(count)
    @given(mutated(body))
    def never_a_5xx(data: bytes) -> None:
        reply = http.post(f"{target}/s/fuzz{path}", content=data)
        assert reply.status_code < 500, f"{data!r}\n{reply.text}"
        if reply.status_code >= 400:
            assert reply.json()["error"]["message"]

    never_a_5xx()


@pytest.mark.parametrize("name", ROUTES)
def test_a_mutated_body_is_answered_below_500(target: str, name: str) -> None:
    fuzz_route(target, name, SHORT)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ROUTES)
def test_ten_thousand_mutated_bodies_are_answered_below_500(target: str, name: str) -> None:
    fuzz_route(target, name, LONG)


@given(st.text(st.characters(exclude_categories=()), max_size=40))
@runs(200)
def path_is_answered(target: str, text: str) -> None:
    encoded = "".join(f"%{byte:02x}" for byte in text.encode("utf-8", "surrogatepass"))
    for path in (f"/v1/responses/{encoded}", f"/v1/models/{encoded}", f"/s/{encoded}/v1/models"):
        reply = http.get(target + path)
        assert reply.status_code < 500, f"{path}\n{reply.text}"


def test_odd_paths_are_answered_below_500(target: str) -> None:
    path_is_answered(target)
