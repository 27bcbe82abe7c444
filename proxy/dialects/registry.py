"""The dialects that this proxy speaks, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from bridle.proxy.dialects.chat import completions
from bridle.proxy.dialects.chat import reply as chat_reply
from bridle.proxy.dialects.chat import request as chat_request
from bridle.proxy.dialects.chat.completions import CompletionsEmitter
from bridle.proxy.dialects.chat.stream import ChatEmitter
from bridle.proxy.dialects.errors import anthropic_error, google_error, openai_error
from bridle.proxy.dialects.google import reply as google_reply
from bridle.proxy.dialects.google import request as google_request
from bridle.proxy.dialects.google.stream import GoogleEmitter
from bridle.proxy.dialects.messages import reply as messages_reply
from bridle.proxy.dialects.messages import request as messages_request
from bridle.proxy.dialects.messages.stream import MessagesEmitter
from bridle.proxy.dialects.responses import reply as responses_reply
from bridle.proxy.dialects.responses import request as responses_request
from bridle.proxy.dialects.responses.stream import ResponsesEmitter
from bridle.proxy.wire.canonical import Dialect, DialectName, Parse

CHAT: Final = Dialect(
    "chat", chat_request.parse, ChatEmitter, chat_reply.write, openai_error, "chatcmpl"
)
COMPLETIONS: Final = Dialect(
    "completions", completions.parse, CompletionsEmitter, completions.write, openai_error, "cmpl"
)
RESPONSES: Final = Dialect(
    "responses",
    responses_request.parse,
    ResponsesEmitter,
    responses_reply.write,
    openai_error,
    "resp",
)
MESSAGES: Final = Dialect(
    "messages",
    messages_request.parse,
    MessagesEmitter,
    messages_reply.write,
    anthropic_error,
    "msg",
    tool_call_prefix="toolu",
)
GOOGLE: Final = Dialect(
    "google", google_request.parse, GoogleEmitter, google_reply.write, google_error, "resp"
)
DIALECTS: Final[Mapping[DialectName, Dialect]] = {
    dialect.name: dialect for dialect in (CHAT, COMPLETIONS, RESPONSES, MESSAGES, GOOGLE)
}


class Counting(NamedTuple):
    """A dialect's request for the number of tokens of a prompt, and its reply."""

    parse: Parse
    reply: Callable[[int], bytes]


COUNTING: Final[Mapping[DialectName, Counting]] = {
    "messages": Counting(messages_request.parse_count, messages_reply.count),
    "google": Counting(google_request.parse, google_reply.count),
}
