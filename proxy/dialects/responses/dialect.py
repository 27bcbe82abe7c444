"""OpenAI Responses: the API that Codex and the OpenAI Agents SDK use."""

from __future__ import annotations

from typing import Final

from bridle.proxy.dialects.errors import openai_error
from bridle.proxy.dialects.responses import reply, request
from bridle.proxy.dialects.responses.stream import ResponsesEmitter
from bridle.proxy.wire.canonical import Dialect

RESPONSES: Final = Dialect(
    name="responses",
    parse=request.parse,
    emitter=ResponsesEmitter,
    reply=reply.write,
    error=openai_error,
    response_prefix="resp",
)
