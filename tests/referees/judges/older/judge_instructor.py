"""Instructor, in each of its modes that need no service besides the model's API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import instructor
import pytest
from anthropic import Anthropic
from asked import EXACTLY, MODEL, OSLO, QUESTION, City
from google import genai
from instructor import Mode
from openai import OpenAI

PLAIN: dict[str, Any] = {"api_key": "k", "max_retries": 0}


def _openai(url: str, mode: Mode) -> Any:
    return instructor.from_openai(OpenAI(base_url=f"{url}/v1", **PLAIN), mode=mode)


def _anthropic(url: str, mode: Mode) -> Any:
    return instructor.from_anthropic(Anthropic(base_url=url, **PLAIN), mode=mode)


def _google(url: str, mode: Mode) -> Any:
    options = genai.types.HttpOptions(base_url=url)
    return instructor.from_genai(genai.Client(api_key="k", http_options=options), mode=mode)


CALLED = City(name="Paris", people=3)
"""The arguments that the scripted engine gives to the tool of a city."""
CASES: list[tuple[Callable[[str, Mode], Any], Mode]] = [
    (_openai, Mode.TOOLS),
    (_openai, Mode.TOOLS_STRICT),
    (_openai, Mode.JSON),
    (_openai, Mode.JSON_SCHEMA),
    (_openai, Mode.MD_JSON),
    (_openai, Mode.RESPONSES_TOOLS),
    (_anthropic, Mode.ANTHROPIC_TOOLS),
    (_anthropic, Mode.ANTHROPIC_JSON),
    (_google, Mode.GENAI_TOOLS),
    (_google, Mode.GENAI_STRUCTURED_OUTPUTS),
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("made", "mode"), CASES, ids=[mode.name for _, mode in CASES])
def test_city(made: Any, mode: Mode, streamed: bool, url: str) -> None:
    client, tools = made(url, mode), "TOOLS" in mode.name
    asked: dict[str, Any] = {"model": MODEL, "response_model": City, "max_retries": 1}
    asked["messages"] = [{"role": "user", "content": QUESTION if tools else EXACTLY}]
    if made is _anthropic:
        asked["max_tokens"] = 999
    if streamed:
        *_, city = client.chat.completions.create_partial(**asked)
    else:
        city = client.chat.completions.create(**asked)
    assert city.model_dump() == (CALLED if tools else OSLO).model_dump()
