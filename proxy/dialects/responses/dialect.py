"""OpenAI Responses as one object."""

from __future__ import annotations

import re
from typing import Final

import orjson

from bridle.proxy.dialects.chat.dialect import OPENAI, OPENAI_MODELS
from bridle.proxy.dialects.dialect import Action, ApiPath, Counting, Dialect
from bridle.proxy.dialects.errors import openai_error
from bridle.proxy.dialects.responses import reply, request
from bridle.proxy.dialects.responses.stored import StoredResponses
from bridle.proxy.dialects.responses.stream import ResponsesEmitter


def _count(input_tokens: int) -> bytes:
    return orjson.dumps({"object": "response.input_tokens", "input_tokens": input_tokens})


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
    ),
    parse=request.parse,
    parse_on=request.parse_on,
    emitter=ResponsesEmitter,
    reply=reply.write,
    error=openai_error,
    models=OPENAI_MODELS,
    response_prefix="resp",
    misplaced=re.compile("/responses"),
    count=Counting(request.parse, _count),
    stored=StoredResponses,
)
