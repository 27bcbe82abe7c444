"""Anthropic Messages as one object."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
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
from bridle.proxy.dialects.errors import anthropic_error
from bridle.proxy.dialects.messages import reply, request, streamed
from bridle.proxy.dialects.messages.received import ReceivedMessage
from bridle.proxy.dialects.messages.stored import StoredThreads
from bridle.proxy.dialects.messages.stream import MessagesEmitter
from bridle.proxy.dialects.wording import Piece, Wording

ANTHROPIC: Final = Provider(
    "anthropic",
    url_variables=("ANTHROPIC_BASE_URL",),
    # Not ANTHROPIC_API_KEY: Claude Code warns when both credentials are set.
    key_variables=("ANTHROPIC_AUTH_TOKEN",),
    key_header="x-api-key",
)


def _model(model: Model) -> dict[str, Any]:
    return {
        "type": "model",
        "id": model.id,
        "display_name": model.id,
        "created_at": datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "deprecated_at": None,
        "retires_at": None,
        "line": None,
        "capabilities": None,
        "max_input_tokens": model.context_length,
        "max_tokens": model.context_length,
    }


def _list(models: Sequence[Model]) -> bytes:
    ends = [models[0].id, models[-1].id] if models else [None, None]
    page = {"has_more": False, "first_id": ends[0], "last_id": ends[1]}
    return orjson.dumps({"data": [_model(model) for model in models], **page})


def _pieces(event: dict[str, Any]) -> Iterator[Piece]:
    delta = event.get("delta")
    if isinstance(delta, dict) and isinstance(delta.get("partial_json"), str):
        yield Piece(event.get("index"), delta, "partial_json")


_CLIENTS: Final = sent_with("anthropic-version")

MESSAGES: Final = Dialect(
    name="messages",
    provider=ANTHROPIC,
    paths=(
        ApiPath("/v1/messages"),
        ApiPath("/v1/messages/count_tokens", Action.COUNT),
        ApiPath("/v1/models", Action.MODELS, "GET", _CLIENTS),
        ApiPath("/v1/models/(?P<model>.+)", Action.MODELS, "GET", _CLIENTS),
        ApiPath("/api/hello", Action.HELLO, "HEAD"),
    ),
    parse=request.parse,
    parse_on=request.parse_on,
    emitter=MessagesEmitter,
    reply=reply.write,
    error=anthropic_error,
    models=ModelList(lambda model: orjson.dumps(_model(model)), _list),
    response_prefix="msg",
    tool_call_prefix="toolu",
    misplaced=re.compile("/messages|/api/"),
    count=Counting(request.parse_count, reply.count),
    stored=StoredThreads,
    # DeepSeek, Kimi, MiniMax and Z.ai serve Messages under a path of this name.
    native=Native(
        re.compile(r"//api\.anthropic\.com(?:[/:]|$)|/anthropic/?$"),
        ReceivedMessage,
        Wording(
            ("system", "tools", "messages"),
            arguments=(("id", "input"),),
            results=("tool_use_id", "content"),
            pieces=_pieces,
        ),
        streamed.stream,
        headers=("anthropic-",),
    ),
)
