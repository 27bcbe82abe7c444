"""The names of what runs in the background: each recorded one, and the new session's.

A recorded reply asks for ``session ID 8001``, which in the new session is 8007. The model's context
has the recorded names, and the harness knows the new ones. So the new names are put into replies
that go to the harness, recorded or live, and the recorded ones into the requests that come from it.
A name is replaced only where its context shows that it is one: behind words such as ``session ID``
in a text, and in a field of a tool's arguments whose name ends in ``id``, or behind ``kill``. A
name of letters and digits is replaced wherever it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from msgspec import structs

from bridle.proxy.dialects.dialect import Dialect
from bridle.proxy.replay.judgement import DISTINCT, HANDLES, handles
from bridle.proxy.wire.canonical import (
    ApiError,
    Emitter,
    Event,
    Finished,
    Minted,
    Reply,
    Request,
    ToolCallDelta,
)
from bridle.store.records import Message

_NAME: Final = re.compile(r"[\w-]+$")
_ARGUMENT: Final = re.compile(r'("\w*id"\s*:\s*"?|\bkill(?: -\w+)* )([\w-]+)', re.IGNORECASE)


class Aliases:
    """The new name of each recorded one, and the other way round."""

    def __init__(self) -> None:
        self._new: dict[str, str] = {}
        self._recorded: dict[str, str] = {}

    def __bool__(self) -> bool:
        return any(was != new for was, new in self._new.items())

    def learn(self, recorded: str, now: str) -> bool:
        """Learn the names in two texts that differ by nothing else.

        Return False if one of them stands for another name already.
        """
        for was, new in zip(handles(recorded), handles(now), strict=False):
            known = self._new.get(was, new), self._recorded.get(new, was)
            if known != (new, was):
                return False
            self._new[was], self._recorded[new] = new, was
        return True

    def recorded(self, message: Message) -> Message:
        """Return a message of the harness with the recorded names."""
        if not self._recorded:
            return message
        if message.tool_calls:
            calls = tuple(
                structs.replace(one, arguments=self.recorded_arguments(one.arguments))
                for one in message.tool_calls
            )
            return structs.replace(message, tool_calls=calls)
        if message.role == "tool" and isinstance(message.content, str):
            return structs.replace(message, content=self.recorded_text(message.content))
        return message

    def recorded_arguments(self, sent: str) -> str:
        """Return the arguments of a tool call with the recorded names."""
        return _in_arguments(sent, self._recorded)

    def recorded_text(self, sent: str) -> str:
        """Return the result of a tool with the recorded names."""
        return _in_text(sent, self._recorded)

    def arguments(self, recorded: str) -> str:
        """Return the arguments of a tool call with the new names."""
        return _in_arguments(recorded, self._new)

    def reply(self, reply: Reply) -> Reply:
        """Return a whole reply with the new names."""
        choices = [
            structs.replace(
                choice,
                tool_calls=[
                    structs.replace(one, arguments=self.arguments(one.arguments))
                    for one in choice.tool_calls
                ],
            )
            for choice in reply.choices
        ]
        return structs.replace(reply, choices=choices)


def aliased(dialect: Dialect, aliases: Aliases) -> Dialect:
    """Return the dialect with replies that have the new names."""
    if not aliases:
        return dialect

    def emitter(request: Request, minted: Minted) -> Emitter:
        return _AliasedEmitter(dialect.emitter(request, minted), aliases)

    def reply(request: Request, minted: Minted, whole: Reply) -> bytes:
        return dialect.reply(request, minted, aliases.reply(whole))

    native = dialect.native
    if native is not None:
        native = replace(native, change=aliases.arguments)
    return replace(dialect, emitter=emitter, reply=reply, native=native)


class _AliasedEmitter:
    """Writes a reply with the new names.

    The arguments of a tool call are held until they are whole.
    """

    def __init__(self, emitter: Emitter, aliases: Aliases) -> None:
        self._emitter = emitter
        self._aliases = aliases
        self._held: ToolCallDelta | None = None

    @property
    def content_type(self) -> str:
        return self._emitter.content_type

    def begin(self) -> bytes:
        return self._emitter.begin()

    def event(self, event: Event) -> bytes:
        return b"".join(self._emitter.event(one) for one in self._events(event))

    def keep_alive(self) -> bytes:
        return self._emitter.keep_alive()

    def end(self) -> bytes:
        return b"".join(self._emitter.event(one) for one in self._released()) + self._emitter.end()

    def fail(self, error: ApiError) -> bytes:
        return self._emitter.fail(error)

    def _events(self, event: Event) -> Iterator[Event]:
        held = self._held
        if isinstance(event, ToolCallDelta):
            if held is not None and (held.index, held.choice) == (event.index, event.choice):
                self._held = structs.replace(held, arguments=held.arguments + event.arguments)
                return
            yield from self._released()
            self._held = event
            return
        if isinstance(event, Finished):
            yield from self._released()
        yield event

    def _released(self) -> Iterator[Event]:
        held, self._held = self._held, None
        if held is not None:
            yield structs.replace(held, arguments=self._aliases.arguments(held.arguments))


def _in_text(text: str, names: Mapping[str, str]) -> str:
    def renamed(match: re.Match[str]) -> str:
        return _NAME.sub(lambda name: names.get(name[0], name[0]), match[0])

    return _everywhere(HANDLES.sub(renamed, text), names)


def _in_arguments(arguments: str, names: Mapping[str, str]) -> str:
    return _everywhere(_ARGUMENT.sub(lambda m: m[1] + names.get(m[2], m[2]), arguments), names)


def _everywhere(text: str, names: Mapping[str, str]) -> str:
    return DISTINCT.sub(lambda name: names.get(name[0], name[0]), text)
