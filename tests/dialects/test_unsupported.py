"""Each field that matters to the model is carried out or refused; none is dropped in silence.

A field matters if it carries history or tools, or changes what the model is asked. A refusal has a
remedy in the dialect's own shape.
"""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from bridle.proxy.dialects.chat import request as chat
from bridle.proxy.dialects.dialect import Dialect
from bridle.proxy.dialects.google import request as google
from bridle.proxy.dialects.messages import request as messages
from bridle.proxy.dialects.registry import CHAT, GOOGLE, MESSAGES, RESPONSES
from bridle.proxy.dialects.responses import request as responses
from bridle.proxy.dialects.responses import tools as responses_tools
from bridle.proxy.wire.canonical import ApiError

HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"model": "m", "messages": HI},
    "responses": {"model": "m", "input": "hi"},
    "messages": {"model": "m", "max_tokens": 9, "messages": HI},
    "google": {"contents": [{"parts": [{"text": "hi"}]}]},
}
PATH = {"model": "m", "method": "generateContent"}
ASKED: dict[str, Any] = {
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "modalities": ["text", "audio"],
    "conversation": "conv_1",
    "prompt": {"id": "pmpt_1"},
    "background": True,
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "compaction": {"type": "summary"},
    "container": "container_1",
    "mcp_servers": [{"type": "url", "url": "https://a", "name": "a"}],
    "cachedContent": "cachedContents/1",
    "chat_template": "{{ messages }}",
    "documents": [{"text": "d"}],
    "web_search_options": {"search_context_size": "low"},
}
NOTHING = (None, False, "", [], {})
TABLES: list[tuple[Dialect, Any]] = [
    (CHAT, chat.REFUSED),
    (RESPONSES, responses.REFUSED),
    (MESSAGES, messages.REFUSED),
    (GOOGLE, google.REFUSED),
]
TOOLS: list[tuple[Dialect, str, Any]] = [
    *((CHAT, kind, {"type": kind, kind: {"name": "a"}}) for kind in chat.REFUSED_TOOLS),
    *((RESPONSES, kind, {"type": kind}) for kind in responses_tools.REFUSED),
    *((MESSAGES, kind, {"type": kind, "name": "a"}) for kind in messages.REFUSED_TOOLS),
    *((GOOGLE, kind, {kind: {"a": 1}}) for kind in google.REFUSED_TOOLS),
]


def refusal(dialect: Dialect, **fields: Any) -> ApiError:
    body = orjson.dumps(BODIES[dialect.name] | fields)
    with pytest.raises(ApiError) as caught:
        dialect.parse(body, PATH, {})
    assert caught.value.status == 400
    shown = orjson.loads(dialect.error(caught.value).body)["error"]["message"]
    assert "is not carried out here; " in shown
    assert len(shown.partition("; ")[2]) > len("leave it")
    return caught.value


@pytest.mark.parametrize(
    ("dialect", "name"),
    [(dialect, name) for dialect, table in TABLES for name in table],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_each_field_is_refused_with_a_remedy_and_passes_when_it_asks_for_nothing(
    dialect: Dialect, name: str
) -> None:
    assert refusal(dialect, **{name: ASKED[name]}).param == name
    for nothing in NOTHING:
        dialect.parse(orjson.dumps(BODIES[dialect.name] | {name: nothing}), PATH, {})


@pytest.mark.parametrize(
    ("dialect", "kind", "tool"), TOOLS, ids=[f"{one.name}-{kind}" for one, kind, _ in TOOLS]
)
def test_tools_that_bring_what_only_the_provider_has_are_refused(
    dialect: Dialect, kind: str, tool: Any
) -> None:
    error = refusal(dialect, tools=[tool])
    assert error.param == "tools[0]"
    assert kind in error.message


def test_harmless_values_of_refused_fields_pass() -> None:
    for fields in ({"modalities": ["text"]}, {"function_call": "none"}):
        CHAT.parse(orjson.dumps(BODIES["chat"] | fields), {}, {})
    for dialect in (CHAT, RESPONSES, MESSAGES, GOOGLE):
        dialect.parse(orjson.dumps(BODIES[dialect.name] | {"something_new": {"a": 1}}), PATH, {})


@pytest.mark.parametrize("asked", [["AUDIO"], ["TEXT", "IMAGE"], "AUDIO", 7])
def test_gemini_is_asked_for_text_alone(asked: Any) -> None:
    config = {"responseModalities": asked}
    assert refusal(GOOGLE, generationConfig=config).param == "generationConfig.responseModalities"
    for harmless in (["TEXT"], ["text"], [], None):
        config = {"responseModalities": harmless}
        GOOGLE.parse(orjson.dumps(BODIES["google"] | {"generationConfig": config}), PATH, {})


@pytest.mark.parametrize("name", ["continue_final_message", "add_generation_prompt"])
def test_an_engines_own_fields_about_the_prompt_reach_it(name: str) -> None:
    request = CHAT.parse(orjson.dumps(BODIES["chat"] | {name: True}), {}, {})
    assert request.extra == {name: True}
