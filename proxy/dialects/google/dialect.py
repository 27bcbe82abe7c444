"""Google's Gemini API: generateContent, streamGenerateContent and countTokens."""

from __future__ import annotations

from typing import Final

from bridle.proxy.dialects.errors import google_error
from bridle.proxy.dialects.google import reply, request
from bridle.proxy.dialects.google.stream import GoogleEmitter
from bridle.proxy.wire.canonical import Dialect

GOOGLE: Final = Dialect(
    name="google",
    parse=request.parse,
    emitter=GoogleEmitter,
    reply=reply.write,
    error=google_error,
    response_prefix="resp",
)
