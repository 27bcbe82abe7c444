"""Google Gemini as one object."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import orjson

from bridle.proxy.dialects.dialect import (
    Action,
    ApiPath,
    Counting,
    Dialect,
    Model,
    ModelList,
    Native,
    Provider,
    sent_with,
)
from bridle.proxy.dialects.errors import google_error
from bridle.proxy.dialects.google import reply, request
from bridle.proxy.dialects.google.received import ReceivedContent
from bridle.proxy.dialects.google.stream import GoogleEmitter
from bridle.proxy.dialects.wording import Wording

GEMINI: Final = Provider(
    "google",
    url_variables=("GOOGLE_GEMINI_BASE_URL",),
    key_variables=("GEMINI_API_KEY",),
    key_header="x-goog-api-key",
    trace_name="gcp.gemini",
)


def _model(model: Model) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "name": f"models/{model.id}",
        "version": "1",
        "displayName": model.id,
        "supportedGenerationMethods": ["generateContent", "countTokens"],
    }
    if model.context_length is not None:
        shown["inputTokenLimit"] = model.context_length
        shown["outputTokenLimit"] = model.context_length
    return shown


def _list(models: Sequence[Model]) -> bytes:
    return orjson.dumps({"models": [_model(model) for model in models]})


_MODELS: Final = "/v1(?:beta|alpha)?/models"
_METHODS: Final = "generateContent|streamGenerateContent"
_CLIENTS: Final = sent_with("x-goog-api-key")

GOOGLE: Final = Dialect(
    name="google",
    provider=GEMINI,
    paths=(
        ApiPath(rf"{_MODELS}/(?P<model>.+):(?P<method>{_METHODS})"),
        ApiPath(rf"{_MODELS}/(?P<model>.+):(?P<method>countTokens)", Action.COUNT),
        # A method of Google's (``embedContent``); no model tag (``qwen3:8b``) has this form.
        ApiPath(rf"{_MODELS}/.+:[a-z]+(?:[A-Z][a-z]+)+", Action.NOTHING),
        # A POST calls a method; in a GET the same path may name a model with a tag.
        ApiPath(
            rf"{_MODELS}/.+:\w+",
            Action.NOTHING,
            takes=lambda method, headers: method == "POST",
        ),
        ApiPath("/v1(?:beta|alpha)/models", Action.MODELS, "GET"),
        ApiPath("/v1(?:beta|alpha)/models/(?P<model>.+)", Action.MODELS, "GET"),
        ApiPath("/v1/models", Action.MODELS, "GET", _CLIENTS),
        ApiPath("/v1/models/(?P<model>.+)", Action.MODELS, "GET", _CLIENTS),
    ),
    parse=request.parse,
    parse_on=request.parse_on,
    emitter=GoogleEmitter,
    reply=reply.write,
    error=google_error,
    models=ModelList(lambda model: orjson.dumps(_model(model)), _list),
    response_prefix="resp",
    misplaced=re.compile(rf"/v1beta/|/v1alpha/|{_MODELS}/.+:\w+"),
    count=Counting(request.parse, reply.count),
    native=Native(
        re.compile(r"//generativelanguage\.googleapis\.com(?:[/:]|$)"),
        ReceivedContent,
        Wording(
            ("systemInstruction", "system_instruction", "tools", "contents"),
            arguments=(("name", "args"),),
            results=("name", "response"),
        ),
        reply.stream,
        headers=("x-goog-api-client", "x-goog-request-params"),
    ),
    operation="generate_content",
)
