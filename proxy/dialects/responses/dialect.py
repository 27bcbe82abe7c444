"""OpenAI Responses as one object."""

from __future__ import annotations

import re
from typing import Final

from bridle.proxy.dialects.chat.dialect import OPENAI, OPENAI_MODELS
from bridle.proxy.dialects.dialect import Action, ApiPath, Dialect
from bridle.proxy.dialects.errors import openai_error
from bridle.proxy.dialects.responses import reply, request
from bridle.proxy.dialects.responses.stored import StoredResponses
from bridle.proxy.dialects.responses.stream import ResponsesEmitter

RESPONSES: Final = Dialect(
    name="responses",
    provider=OPENAI,
    paths=(
        ApiPath("/v1/responses"),
        # The excluded names are OpenAI's routes that are not served; they are no response ids.
        ApiPath(
            "/v1/responses/(?!(?:compact|input_tokens)$)(?P<response>[^/]+)",
            Action.STORED,
            "GET, DELETE",
        ),
    ),
    parse=request.parse,
    emitter=ResponsesEmitter,
    reply=reply.write,
    error=openai_error,
    models=OPENAI_MODELS,
    response_prefix="resp",
    misplaced=re.compile("/responses"),
    stored=StoredResponses,
)
