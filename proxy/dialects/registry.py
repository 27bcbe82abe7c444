"""The dialects that this proxy speaks, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from proxy.canonical import ApiError, Dialect, DialectName, Request
from proxy.dialects.chat import ChatDialect
from proxy.dialects.completions import CompletionsDialect
from proxy.dialects.messages import MessagesDialect, count_reply
from proxy.dialects.responses import ResponsesDialect

DIALECTS: Final[Mapping[DialectName, Dialect]] = {
    dialect.name: dialect
    for dialect in (ChatDialect(), CompletionsDialect(), ResponsesDialect(), MessagesDialect())
}

STREAM_FAILURES: Final[Mapping[DialectName, frozenset[str]]] = {
    "responses": ResponsesDialect.stream_failures,
}
"""Kinds of :class:`ApiError` that a provider's clients understand only inside a stream: to a
streaming request they are answered with status 200, ``begin`` and ``fail``."""


class Counting(NamedTuple):
    """How a dialect asks for the number of tokens of a prompt, and is told."""

    parse: Callable[[bytes], Request]
    reply: Callable[[int], bytes]


COUNTING: Final[Mapping[DialectName, Counting]] = {
    "messages": Counting(MessagesDialect().parse_count, count_reply),
}


def dialect_for(name: DialectName) -> Dialect:
    """Raises :class:`ApiError` (404) for a dialect that is not spoken here."""
    found = DIALECTS.get(name)
    if found is None:
        raise ApiError("not_found", f"the {name} API is not served here", status=404)
    return found


def speaker(name: DialectName) -> Dialect:
    """The dialect whose errors a client of ``name`` understands best."""
    return DIALECTS.get(name) or DIALECTS["chat"]
