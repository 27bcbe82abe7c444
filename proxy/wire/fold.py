"""Events to a whole reply: what a non-streaming client gets and what every record keeps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bridle.proxy.wire.canonical import (
    ChoiceReply,
    Event,
    Finished,
    FinishReason,
    ReasoningDelta,
    Reply,
    Started,
    TextDelta,
    Tokens,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from bridle.store.records import TokenIds


class Fold:
    """Grows with each batch of events; :meth:`reply` may be asked at any time, also after a cut."""

    __slots__ = ("_choices", "_reply", "prompt_token_ids", "prompt_tokens", "sampled", "usage")

    def __init__(self) -> None:
        self.prompt_tokens: int | None = None
        self.prompt_token_ids: Sequence[int] | TokenIds | None = None
        self.usage: Usage | None = None
        self.sampled = 0
        """Sampled tokens of all choices so far."""
        self._choices: dict[int, _Choice] = {}
        self._reply: Reply | None = None
        """What was told last, as long as nothing came after it."""

    def take(self, events: Iterable[Event]) -> None:
        # Every token of every stream comes by here: the commonest first, and no call that can be
        # spared.
        self._reply = None
        choices = self._choices
        for event in events:
            if isinstance(event, Tokens):
                choice = choices.get(event.choice) or self.choice(event.choice)
                choice.token_ids += event.token_ids
                choice.logprobs += event.logprobs
                if event.detail:
                    choice.detail.extend(event.detail)
                self.sampled += len(event.token_ids)
            elif isinstance(event, TextDelta):
                choice = choices.get(event.choice) or self.choice(event.choice)
                choice.text.append(event.text)
            else:
                self._take_rarer(event)

    def _take_rarer(self, event: Event) -> None:
        if isinstance(event, ReasoningDelta):
            self.choice(event.choice).reasoning.append(event.text)
        elif isinstance(event, ToolCallDelta):
            self._take_tool_call(event)
        elif isinstance(event, Finished):
            choice = self.choice(event.choice)
            choice.finish_reason = event.reason
            choice.stop_sequence = event.stop_sequence
        elif isinstance(event, Usage):
            self.usage = event
        elif isinstance(event, Started):
            self.prompt_tokens = event.prompt_tokens
            self.prompt_token_ids = event.prompt_token_ids

    def choice(self, index: int) -> _Choice:
        found = self._choices.get(index)
        if found is None:
            found = self._choices[index] = _Choice()
        return found

    def token_count(self, choice: int) -> int:
        found = self._choices.get(choice)
        return len(found.token_ids) if found else 0

    def reply(self) -> Reply:
        if self._reply is None:
            indexes = range(max(self._choices, default=-1) + 1)
            self._reply = Reply(
                choices=[self.choice(index).reply() for index in indexes],
                usage=self.usage,
                prompt_token_ids=self.prompt_token_ids,
            )
        return self._reply

    def _take_tool_call(self, event: ToolCallDelta) -> None:
        calls = self.choice(event.choice).tool_calls
        call = calls.get(event.index)
        if call is None:
            call = calls[event.index] = _Call()
        if event.id is not None:
            call.id = event.id
        if event.name is not None:
            call.name = event.name
        if event.arguments:
            call.arguments.append(event.arguments)


class _Call:
    __slots__ = ("arguments", "id", "name")

    def __init__(self) -> None:
        self.id = ""
        self.name = ""
        self.arguments: list[str] = []


class _Choice:
    """One choice in the making; text in pieces, so that long replies stay linear."""

    __slots__ = (
        "detail",
        "finish_reason",
        "logprobs",
        "reasoning",
        "stop_sequence",
        "text",
        "token_ids",
        "tool_calls",
    )

    def __init__(self) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.tool_calls: dict[int, _Call] = {}
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.detail: list[Mapping[str, Any]] = []
        self.finish_reason: FinishReason | None = None
        self.stop_sequence: str | None = None

    def reply(self) -> ChoiceReply:
        return ChoiceReply(
            text="".join(self.text),
            reasoning="".join(self.reasoning),
            tool_calls=[
                ToolCall(id=call.id, name=call.name, arguments="".join(call.arguments))
                for _, call in sorted(self.tool_calls.items())
            ],
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            detail=self.detail,
            finish_reason=self.finish_reason,
            stop_sequence=self.stop_sequence,
        )


def fold(events: Iterable[Event]) -> Reply:
    """The reply that ``events`` add up to."""
    state = Fold()
    state.take(events)
    return state.reply()
