"""OpenAI Responses as one object."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import orjson

from bridle.proxy.dialects.chat.dialect import OPENAI, OPENAI_MODELS
from bridle.proxy.dialects.dialect import Action, ApiPath, Counting, Dialect, Native
from bridle.proxy.dialects.errors import openai_error
from bridle.proxy.dialects.responses import reply, request, streamed
from bridle.proxy.dialects.responses.received import ReceivedResponse
from bridle.proxy.dialects.responses.stored import StoredResponses
from bridle.proxy.dialects.responses.stream import ResponsesEmitter
from bridle.proxy.dialects.wording import Piece, Wording


def _count(input_tokens: int) -> bytes:
    return orjson.dumps({"object": "response.input_tokens", "input_tokens": input_tokens})


def _pieces(event: dict[str, Any]) -> Iterator[Piece]:
    if str(event.get("type")).endswith(("_arguments.delta", "_input.delta")):
        yield Piece(event.get("output_index"), event, "delta")


_CONVERSATION: Final = "/v1/conversations/(?P<conversation>[^/]+)"

RESPONSES: Final = Dialect(
    name="responses",
    provider=OPENAI,
    paths=(
        ApiPath("/v1/responses"),
        ApiPath("/v1/responses/input_tokens", Action.COUNT),
        ApiPath("/v1/responses/(?P<response>[^/]+)/(?P<part>input_items)", Action.STORED, "GET"),
        # The excluded names are OpenAI's routes that are not served; they are no response ids.
        ApiPath(
            "/v1/responses/(?!(?:compact|input_tokens)$)(?P<response>[^/]+)",
            Action.STORED,
            "GET, DELETE",
        ),
        ApiPath("/v1/conversations", Action.CONVERSATION),
        ApiPath(_CONVERSATION, Action.CONVERSATION, "GET, POST, DELETE"),
        ApiPath(f"{_CONVERSATION}/(?P<items>items)", Action.CONVERSATION, "GET, POST"),
        ApiPath(
            f"{_CONVERSATION}/(?P<items>items)/(?P<item>[^/]+)",
            Action.CONVERSATION,
            "GET, DELETE",
        ),
    ),
    parse=request.parse,
    parse_on=request.parse_on,
    emitter=ResponsesEmitter,
    reply=reply.write,
    error=openai_error,
    models=OPENAI_MODELS,
    response_prefix="resp",
    misplaced=re.compile("/responses|/conversations"),
    count=Counting(request.parse, _count),
    stored=StoredResponses,
    native=Native(
        re.compile(r"//api\.openai\.com(?:[/:]|$)"),
        ReceivedResponse,
        Wording(
            ("instructions", "tools", "input"),
            arguments=(
                *(("call_id", "arguments"), ("call_id", "input")),
                *(("item_id", "arguments"), ("item_id", "input")),
            ),
            results=("call_id", "output"),
            pieces=_pieces,
        ),
        streamed.stream,
        headers=("openai-",),
    ),
)
