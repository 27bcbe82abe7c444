"""The dialects that this proxy speaks, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from bridle.proxy.dialects.chat.completions import CompletionsDialect
from bridle.proxy.dialects.chat.dialect import ChatDialect
from bridle.proxy.dialects.google import dialect as google
from bridle.proxy.dialects.google.dialect import GoogleDialect
from bridle.proxy.dialects.messages import dialect as messages
from bridle.proxy.dialects.messages.dialect import MessagesDialect
from bridle.proxy.dialects.responses.dialect import ResponsesDialect
from bridle.proxy.wire.canonical import Dialect, DialectName, Request

_MESSAGES: Final = MessagesDialect()
_GOOGLE: Final = GoogleDialect()

DIALECTS: Final[Mapping[DialectName, Dialect]] = {
    "chat": ChatDialect(),
    "completions": CompletionsDialect(),
    "responses": ResponsesDialect(),
    "messages": _MESSAGES,
    "google": _GOOGLE,
}


class Counting(NamedTuple):
    """How a dialect asks for the number of tokens of a prompt, and is told."""

    parse: Callable[[bytes, Mapping[str, str], Mapping[str, str]], Request]
    reply: Callable[[int], bytes]


COUNTING: Final[Mapping[DialectName, Counting]] = {
    "messages": Counting(
        lambda body, path, query: _MESSAGES.parse_count(body), messages.count_reply
    ),
    "google": Counting(_GOOGLE.parse, google.count_reply),
}
