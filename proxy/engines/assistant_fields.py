"""Opaque fields of assistant messages that an external upstream wants back.

DeepSeek, Kimi and MiniMax demand the ``reasoning_content`` of a reply with its tool calls, Gemini
the ``thought_signature`` in ``extra_content``, OpenRouter the ``reasoning_details``; other
providers refuse a request with such a field. So each upstream gets the fields that it sent itself
and those that its refusals ask for, except those that its refusals object to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from bridle.proxy.wire.canonical import ApiError, Message
from bridle.store.records import MESSAGE_FIELDS

REASONING: Final = ("reasoning_content", "reasoning")
"""The two names of the text of reasoning."""
_NAMES: Final = (*REASONING, "reasoning_details", "extra_content", "thought_signature")
_MENTIONS: Final = {name: re.compile(rf"(?<![a-z_]){name}(?![a-z_])") for name in _NAMES}


class AssistantFields:
    """The fields that one upstream takes, as learned from its replies and refusals."""

    def __init__(self) -> None:
        self.taken: set[str] = set()
        self._refused: set[str] = set()

    def sent(self, names: Iterable[str]) -> None:
        """Record that the upstream sent these fields."""
        self.taken |= set(names) - self._refused

    def learn(self, error: ApiError, offered: frozenset[str]) -> bool:
        """Learn from the refusal of a request that had the ``offered`` fields to send. Return True
        if other fields are sent from now on."""
        if error.kind != "invalid_request":
            return False
        text = f"{error.message} {error.param or ''}".lower()
        named = {name for name, pattern in _MENTIONS.items() if pattern.search(text)}
        if "thought_signature" in named:
            named.add("extra_content")
        refused = named & offered & self.taken
        missing = (named & offered) - self.taken
        if refused:
            self._refused |= refused
            self.taken -= refused
        elif missing:
            self._refused -= missing
            self.taken |= missing
        return bool(refused or missing)


class OpaqueFields(NamedTuple):
    """The opaque fields of one assistant message and of its tool calls, by field name."""

    position: int
    message: Mapping[str, Any]
    calls: Sequence[Mapping[str, Any]]

    @property
    def names(self) -> set[str]:
        return {*self.message, *(name for call in self.calls for name in call)}


def opaque_fields(messages: Sequence[Message]) -> tuple[OpaqueFields, ...]:
    """Return the opaque fields of all assistant messages that have any."""
    found: list[OpaqueFields] = []
    for position, message in enumerate(messages):
        if message.role != "assistant":
            continue
        made = message.tool_calls
        fields = dict((made[0].extra or {}).get(MESSAGE_FIELDS, {})) if made else {}
        if message.reasoning:
            fields |= dict.fromkeys(REASONING, message.reasoning)
        calls = [call.own_extra for call in made]
        if fields or any(calls):
            found.append(OpaqueFields(position, fields, calls))
    return tuple(found)


def with_opaque_fields(
    messages: Sequence[Mapping[str, Any]], fields: Sequence[OpaqueFields], taken: set[str]
) -> list[Mapping[str, Any]]:
    """Return the chat messages with those of their ``fields`` that the upstream takes."""
    written = list(messages)
    for one in fields:
        message = {**written[one.position], **_taken(one.message, taken)}
        if any(one.calls):
            message["tool_calls"] = [
                {**call, **_taken(extra, taken)}
                for call, extra in zip(message["tool_calls"], one.calls, strict=True)
            ]
        written[one.position] = message
    return written


def _taken(fields: Mapping[str, Any], taken: set[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name in taken}
