"""The two dialects of OpenAI's older APIs, and what all of OpenAI's dialects share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import orjson

from bridle.proxy.dialects.chat import completions, reply, request
from bridle.proxy.dialects.chat.completions import CompletionsEmitter
from bridle.proxy.dialects.chat.stream import ChatEmitter
from bridle.proxy.dialects.dialect import Action, ApiPath, Dialect, Model, ModelList, Provider
from bridle.proxy.dialects.errors import openai_error

OPENAI: Final = Provider(
    "openai",
    url_variables=("OPENAI_BASE_URL", "OPENAI_API_BASE"),
    key_variables=("OPENAI_API_KEY",),
    base_path="/v1",
)


def _model(model: Model) -> dict[str, Any]:
    """Return the model in OpenAI's shape, with the engines' own field ``max_model_len``."""
    shown: dict[str, Any] = {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "bridle",
    }
    if model.context_length is not None:
        shown["max_model_len"] = model.context_length
    return shown


def _list(models: Sequence[Model]) -> bytes:
    return orjson.dumps({"object": "list", "data": [_model(model) for model in models]})


OPENAI_MODELS: Final = ModelList(lambda model: orjson.dumps(_model(model)), _list)

CHAT: Final = Dialect(
    name="chat",
    provider=OPENAI,
    paths=(
        ApiPath("/v1/chat/completions"),
        ApiPath("/v1/models", Action.MODELS, "GET"),
        ApiPath("/v1/models/(?P<model>.+)", Action.MODELS, "GET"),
        ApiPath(
            "/v1/(?P<route>embeddings|moderations|rerank|images|audio|files|batches)(?P<rest>/.*)?",
            Action.BESIDE,
            "GET, POST, DELETE",
        ),
    ),
    parse=request.parse,
    parse_on=request.parse_on,
    emitter=ChatEmitter,
    reply=reply.write,
    error=openai_error,
    models=OPENAI_MODELS,
    response_prefix="chatcmpl",
)
COMPLETIONS: Final = Dialect(
    name="completions",
    provider=OPENAI,
    paths=(ApiPath("/v1/completions"),),
    parse=completions.parse,
    emitter=CompletionsEmitter,
    reply=completions.write,
    error=openai_error,
    models=OPENAI_MODELS,
    response_prefix="cmpl",
    operation="text_completion",
)
