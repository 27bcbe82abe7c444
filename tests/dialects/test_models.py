"""The list of models, read by the official clients."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest
from google import genai
from google.genai import types

from bridle.proxy.dialects.dialect import Model
from bridle.proxy.dialects.registry import CHAT, GOOGLE, MESSAGES

MODELS = [Model("a", 1_700_000_000, 4096), Model("b", 1_700_000_001)]


def test_openais_client_lists_models(server: Any) -> None:
    client = openai.OpenAI(api_key="k", base_url=f"{server.url}/v1")
    server.answer(CHAT.models.all(MODELS))
    assert [model.id for model in client.models.list()] == ["a", "b"]

    server.answer(CHAT.models.one(MODELS[0]))
    assert client.models.retrieve("a").created == 1_700_000_000


@pytest.mark.parametrize("known", [MODELS, []])
def test_anthropics_client_lists_models(server: Any, known: list[Model]) -> None:
    client = anthropic.Anthropic(api_key="k", base_url=server.url)
    server.answer(MESSAGES.models.all(known))
    assert [model.id for model in client.models.list()] == [model.id for model in known]

    server.answer(MESSAGES.models.one(MODELS[0]))
    model = client.models.retrieve("a")
    assert model.created_at.timestamp() == 1_700_000_000
    assert model.max_input_tokens == 4096


def test_googles_client_lists_models(server: Any) -> None:
    options = types.HttpOptions(base_url=server.url)
    client = genai.Client(api_key="k", http_options=options)
    server.answer(GOOGLE.models.all(MODELS))
    assert [model.name for model in client.models.list()] == ["models/a", "models/b"]

    server.answer(GOOGLE.models.one(MODELS[0]))
    assert client.models.get(model="a").input_token_limit == 4096
