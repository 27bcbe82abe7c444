"""Anthropic Messages: the API that Claude Code uses."""

from __future__ import annotations

from typing import Final

from bridle.proxy.dialects.errors import anthropic_error
from bridle.proxy.dialects.messages import reply, request
from bridle.proxy.dialects.messages.stream import MessagesEmitter
from bridle.proxy.wire.canonical import Dialect

MESSAGES: Final = Dialect(
    name="messages",
    parse=request.parse,
    emitter=MessagesEmitter,
    reply=reply.write,
    error=anthropic_error,
    response_prefix="msg",
    tool_call_prefix="toolu",
)
