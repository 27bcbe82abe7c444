"""Events folded to a whole reply, for non-streaming clients and for every record."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from bridle.proxy.wire.canonical import (
    ChoiceReply,
    Event,
    Finished,
    Opaque,
    ReasoningDelta,
    Reply,
    Started,
    TextDelta,
    Tokens,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from bridle.store.records import MESSAGE_FIELDS, TokenIds, VersionRun


class Fold:
    """Grows with each batch of events; :meth:`reply` may be called at any time."""

    __slots__ = (
        "_choices",
        "_now",
        "characters",
        "first_token_at",
        "prompt_token_ids",
        "prompt_tokens",
        "sampled",
        "usage",
        "whole",
    )

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        """``now`` returns the time in seconds since 1970."""
        self._now = now
        self.prompt_tokens: int | None = None
        self.prompt_token_ids: Sequence[int] | TokenIds | None = None
        self.usage: Usage | None = None
        self.sampled = 0
        """Sampled tokens of all choices so far."""
        self.characters = 0
        """Characters of texts, thoughts and arguments of all choices so far."""
        self.first_token_at: float | None = None
        """Time of the first token's arrival in seconds since 1970."""
        self._choices: dict[int, _Choice] = {}
        self.whole: Reply | None = None
        """The latest result of :meth:`reply`, until further events come."""

    def take(self, events: Iterable[Event], version: int = 0) -> None:
        """Add ``events`` and stamp their tokens with the policy ``version`` of this moment."""
        # Every token of every stream passes here: the commonest events come first, and nothing is
        # called that need not be.
        self.whole = None
        choices = self._choices
        for event in events:
            if isinstance(event, Usage):
                self.usage = event
                continue
            if isinstance(event, Started):
                self.prompt_tokens = event.prompt_tokens
                self.prompt_token_ids = event.prompt_token_ids
                continue
            choice = choices.get(event.choice)
            if choice is None:
                choice = choices[event.choice] = _Choice()
            if isinstance(event, Tokens):
                if choice.version != version and event.token_ids:
                    choice.version = version
                    choice.versions.append(VersionRun(len(choice.token_ids), version))
                    self.first_token_at = self.first_token_at or self._now()
                choice.token_ids += event.token_ids
                choice.logprobs += event.logprobs
                choice.detail += event.detail or ()
                choice.kept += event.kept
                self.sampled += len(event.token_ids)
            elif isinstance(event, TextDelta):
                choice.text.append(event.text)
                self.characters += len(event.text)
            elif isinstance(event, ReasoningDelta):
                choice.reasoning.append(event.text)
                self.characters += len(event.text)
            elif isinstance(event, Finished):
                choice.finished = event
            else:
                self.characters += choice.take(event)

    def reply(self) -> Reply:
        """Return the reply so far.

        A choice without events that stands before one with events is empty.
        """
        if self.whole is None:
            choices: list[ChoiceReply] = []
            for index in range(max(self._choices, default=-1) + 1):
                choice = self._choices.get(index) or _Choice()
                calls: list[ToolCall] = []
                if choice.tool_calls:
                    for _, call in sorted(choice.tool_calls.items()):
                        calls.append(call.whole(choice.opaque if not calls else {}))
                finished = choice.finished
                choices.append(
                    ChoiceReply(
                        text="".join(choice.text),
                        reasoning="".join(choice.reasoning),
                        tool_calls=calls,
                        token_ids=choice.token_ids,
                        logprobs=choice.logprobs,
                        versions=choice.versions,
                        detail=choice.detail,
                        finish_reason=finished.reason if finished else None,
                        stop_sequence=finished.stop_sequence if finished else None,
                        opaque=choice.opaque,
                        kept=choice.kept,
                        routed_experts=finished.routed_experts if finished else None,
                    )
                )
            self.whole = Reply(choices, self.usage, self.prompt_token_ids)
        return self.whole


class _Call:
    """One tool call in the making."""

    __slots__ = ("extra", "head", "pieces")

    def __init__(self, head: ToolCallDelta) -> None:
        self.head = head
        """The call's first piece, which has its id and name."""
        self.pieces: list[str] = []
        self.extra: dict[str, Any] = {}

    def whole(self, opaque: Mapping[str, Any]) -> ToolCall:
        """Return the whole call.

        ``opaque`` holds the fields of its message, which the first call keeps.
        """
        head, extra = self.head, self.extra
        if opaque:
            extra = {**extra, MESSAGE_FIELDS: opaque}
        arguments = "".join(self.pieces)
        return ToolCall(head.id or "", head.name or "", arguments, head.engine_id, extra or None)


class _Choice:
    """One choice in the making. Text is kept in pieces, so that long replies stay linear."""

    __slots__ = (
        "detail",
        "finished",
        "kept",
        "logprobs",
        "opaque",
        "reasoning",
        "text",
        "token_ids",
        "tool_calls",
        "version",
        "versions",
    )

    def __init__(self) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.tool_calls: dict[int, _Call] = {}
        """The tool calls by their index."""
        self.opaque: dict[str, Any] = {}
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.kept: list[Sequence[int]] = []
        self.version: int | None = None
        """The policy version of the latest tokens."""
        self.versions: list[VersionRun] = []
        self.detail: list[Mapping[str, Any] | msgspec.Raw] = []
        self.finished: Finished | None = None

    def take(self, event: ToolCallDelta | Opaque) -> int:
        """Add a piece of a tool call, or opaque fields, whose lists are joined.

        Return the number of characters of the piece.
        """
        if isinstance(event, ToolCallDelta):
            call = self.tool_calls.get(event.index)
            if call is None:
                call = self.tool_calls[event.index] = _Call(event)
            call.pieces.append(event.arguments)
            if event.extra:
                call.extra.update(event.extra)
            return len(event.arguments)
        for name, value in event.fields.items():
            known = self.opaque.get(name)
            if isinstance(known, list) and isinstance(value, list):
                known += value
            else:
                self.opaque[name] = [*value] if isinstance(value, list) else value
        return 0


def events_of(reply: Reply, choice: int) -> Iterator[Event]:
    """Yield the events of one choice of a whole reply.

    This is the inverse of the fold, except for where texts were cut.
    """
    if choice < len(reply.choices):
        whole = reply.choices[choice]
        if whole.reasoning:
            yield ReasoningDelta(whole.reasoning, choice)
        if whole.opaque:
            yield Opaque(whole.opaque, choice)
        yield Tokens(whole.token_ids, whole.logprobs, choice, whole.detail)
        if whole.text:
            yield TextDelta(whole.text, choice)
        for index, call in enumerate(whole.tool_calls):
            extra = call.own_extra if call.extra else None
            yield ToolCallDelta(
                index, call.id, call.name, call.arguments, choice, call.engine_id, extra
            )
        if whole.finish_reason is not None:
            yield Finished(whole.finish_reason, choice, whole.stop_sequence)
    if reply.usage is not None:
        yield reply.usage
