"""OpenAI chat completions: engines use the same shape, so the translation is thin."""

from __future__ import annotations

from typing import Final

from bridle.proxy.dialects.chat import reply, request
from bridle.proxy.dialects.chat.stream import ChatEmitter
from bridle.proxy.dialects.errors import openai_error
from bridle.proxy.wire.canonical import Dialect

CHAT: Final = Dialect(
    name="chat",
    parse=request.parse,
    emitter=ChatEmitter,
    reply=reply.write,
    error=openai_error,
    response_prefix="chatcmpl",
)
