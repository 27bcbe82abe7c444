"""The dialects that this proxy speaks, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from bridle.proxy.dialects.chat.completions import COMPLETIONS
from bridle.proxy.dialects.chat.dialect import CHAT
from bridle.proxy.dialects.google import reply as google_reply
from bridle.proxy.dialects.google.dialect import GOOGLE
from bridle.proxy.dialects.messages import reply as messages_reply
from bridle.proxy.dialects.messages import request as messages_request
from bridle.proxy.dialects.messages.dialect import MESSAGES
from bridle.proxy.dialects.responses.dialect import RESPONSES
from bridle.proxy.wire.canonical import Dialect, DialectName, Parse

DIALECTS: Final[Mapping[DialectName, Dialect]] = {
    dialect.name: dialect for dialect in (CHAT, COMPLETIONS, RESPONSES, MESSAGES, GOOGLE)
}


class Counting(NamedTuple):
    """A dialect's request for the number of tokens of a prompt, and its reply."""

    parse: Parse
    reply: Callable[[int], bytes]


COUNTING: Final[Mapping[DialectName, Counting]] = {
    "messages": Counting(messages_request.parse_count, messages_reply.count),
    "google": Counting(GOOGLE.parse, google_reply.count),
}
