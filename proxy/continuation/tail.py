"""The text that a chat template writes after a reply, made without rendering the history.

This works for any template. A short surrogate conversation is rendered that ends in an assistant
turn of the same shape, followed by the new messages and the generation prompt. The assistant's text
is a marker word; the end of the turn and then the tail follow it. Nothing model-specific is known
here except the tokenizer's own data: which tokens are special, and which of them end a reply. Where
the text depends on the history, the history stands in the surrogate conversation too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from typing import Any

import numpy as np
import orjson

from bridle.engine.contract.errors import TemplateError
from bridle.engine.contract.tokenizer import Tokenizer
from bridle.errors import BridleError
from bridle.proxy.wire.canonical import Message
from bridle.store.records import TokenIds

MARKER = "XbridleX"
_MARKERS = re.compile(f"{MARKER}+")
"""A pattern for the marker, and for the longer words that replace it if a message contains it."""


class SeamError(BridleError, ValueError):
    """The place where the reply ends cannot be found in this template's text."""


class Shape(StrEnum):
    """The parts of a reply that stand in its surrogate conversation."""

    WHOLE = "text and calls"
    CALLS = "calls alone"
    TEXT = "text alone"
    """The shape for templates that drop calls."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The parts of a prompt around a conversation's turns."""

    head: tuple[Message, ...] = ()
    """The leading system messages; some templates repeat them before the last user turn."""
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Tail:
    """The rendered new messages, with the generation prompt."""

    text: str
    """The text after the end-of-turn token."""
    token_ids: TokenIds
    """The ids of ``text`` (``uint32``), tokenised as it is after that token."""
    end_text: str
    """The template's end-of-turn token for this reply. It is empty if there is none, and the next
    turn's first token then ends a reply."""
    end_id: int | None


class TailRenderer:
    """A renderer of tails for one model directory."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.backend.get_added_tokens_decoder()
        specials = {token.content: token_id for token_id, token in added.items() if token.special}
        self._special_ids: Mapping[str, int] = specials
        longest_first = sorted(specials, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._eos = frozenset(
            text for text, token_id in specials.items() if token_id in tokenizer.eos_token_ids
        )
        self._closings: dict[tuple[object, ...], str | None] = {}

    def tail(
        self,
        reply: Message,
        messages: Sequence[Message],
        setting: Setting,
        shape: Shape = Shape.WHOLE,
    ) -> Tail:
        """Return the tail that ``messages`` make after ``reply``, whose surrogate has ``shape``.

        Raises :class:`TemplateError` if the template refuses the messages, :class:`SeamError` if
        the end of the reply cannot be found.
        """
        marker = _unused_marker(messages)
        conversation = surrogate(reply, setting.head, marker, shape)
        conversation += [message.to_chat() for message in messages]
        _, after = _around(self._text(conversation, setting, ends=False), marker)
        return self._cut(after, reply, setting, shape)

    def tail_of_whole(
        self,
        before: Sequence[Message],
        reply: Message,
        messages: Sequence[Message],
        setting: Setting,
    ) -> Tail:
        """Return the tail that ``messages`` make after ``reply``, rendered with all ``before`` it.

        This is for templates whose text depends on the history, such as those that number the tool
        results. It takes time in proportion to the history. The tail must be the end of the whole
        conversation's rendering, and the new messages must not change what stands before the reply.

        Raises :class:`TemplateError` and :class:`SeamError` like :meth:`tail`.
        """
        history = [message.to_chat() for message in before]
        new = [message.to_chat() for message in messages]
        whole = self._text([*history, reply.to_chat(), *new], setting, ends=False)
        marker = _unused_marker([*before, reply, *messages])
        objection: BridleError = SeamError("the end of the reply cannot be found")
        for shape in shapes_for(reply):
            conversation = [*history, _stand_in(reply, marker, shape)]
            try:
                alone, _ = _around(self._text(conversation, setting, ends=True), marker)
                start, after = _around(
                    self._text([*conversation, *new], setting, ends=False), marker
                )
                tail = self._cut(after, reply, setting, shape)
            except (TemplateError, SeamError) as error:
                objection = error
                continue
            if start == alone and whole.endswith(tail.end_text + tail.text):
                return tail
            objection = SeamError("the new turns change the text of earlier ones")
        raise objection

    def _cut(self, after: str, reply: Message, setting: Setting, shape: Shape) -> Tail:
        """Return the tail in ``after``, which begins behind the last word of the reply."""
        start, end = self._seam(after, self.closing(reply, setting, shape))
        ids = self.tokenizer.encode(after[start:])
        end_text = after[start:end]
        if not end_text:
            return Tail(after[end:], np.asarray(ids, dtype=np.uint32), "", None)
        end_id = self._special_ids[end_text]
        if ids[:1] != [end_id]:
            raise SeamError(f"{end_text!r} is not a token of its own at the end of a turn")
        return Tail(after[end:], np.asarray(ids[1:], dtype=np.uint32), end_text, end_id)

    def closing(self, reply: Message, setting: Setting, shape: Shape = Shape.WHOLE) -> str | None:
        """Return the text after the reply's last word in a conversation that ends with the reply.

        Return ``None`` if the template does not render such a conversation. A token that ends the
        conversation and not the turn (an end-of-text token) is left out.
        """
        kwargs = orjson.dumps(setting.template_kwargs, option=orjson.OPT_SORT_KEYS)
        key = (len(reply.tool_calls), bool(reply.content), bool(setting.tools), kwargs, shape)
        if key not in self._closings:
            conversation = surrogate(reply, setting.head, MARKER, shape)
            try:
                _, closing = _around(self._text(conversation, setting, ends=True), MARKER)
            except TemplateError:
                self._closings[key] = None
            else:
                self._closings[key] = self._of_the_turn(closing, conversation, setting)
        return self._closings[key]

    def _of_the_turn(
        self, closing: str, conversation: list[dict[str, Any]], setting: Setting
    ) -> str:
        """Return the part of ``closing`` that also stands there if the conversation goes on.

        Return all of ``closing`` if that part has no special token.
        """
        more = [*conversation, {"role": "user", "content": "Xmore?"}]
        try:
            _, followed = _around(self._text(more, setting, ends=False), MARKER)
        except (TemplateError, SeamError):
            return closing
        pairs = zip(closing, followed, strict=False)
        shared = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return shared if self._special.search(shared) else closing

    def ends_of(self, text: str) -> list[str]:
        """Return the texts that may be a conversation up to the end of its last reply.

        The first is all of it; if two special tokens end it, the second lacks the last token, which
        may end the conversation instead.
        """
        ends = [text.rstrip()]
        specials = list(self._special.finditer(text))
        if len(specials) > 1 and specials[-1].end() == len(ends[0]):
            before, last = specials[-2:]
            if not text[before.end() : last.start()].strip():
                ends.append(text[: before.end()])
        return ends

    def end_of_turn(self, closing: str) -> tuple[int, int] | None:
        """Return the start and the end of the end-of-turn token in a closing.

        Return ``None`` if the closing has none.
        """
        found = list(self._special.finditer(closing))
        ends = [match for match in found if match.group() in self._eos] or found
        return ends[-1].span() if ends else None

    def _seam(self, after: str, closing: str | None) -> tuple[int, int]:
        """Return the start and the end of the end-of-turn token in ``after``.

        They are equal if there is no such token. Raises :class:`SeamError` if the end of the reply
        cannot be found.
        """
        end = self.end_of_turn(closing) if closing is not None else None
        if closing is not None and end is None:
            # The reply's own markup is behind the marker; white space after it is the template's.
            length = len(closing.rstrip())
            if not after.startswith(closing[:length]):
                raise SeamError("the template closes a reply differently when more follows")
            return length, length
        if closing is not None and end is not None and after.startswith(closing[: end[1]]):
            return end
        # Some templates end the last reply with another token than earlier ones.
        first = self._special.search(after)
        if first is None:
            raise SeamError("no special token ends a reply")
        return first.span()

    def _text(
        self, conversation: Sequence[Mapping[str, Any]], setting: Setting, *, ends: bool
    ) -> str:
        return self.tokenizer.render(
            conversation,
            setting.tools or None,
            add_generation_prompt=not ends,
            **(setting.template_kwargs or {}),
        )


def shapes_for(reply: Message) -> tuple[Shape, ...]:
    """Return the shapes that a surrogate for ``reply`` may have, the most likely first."""
    if not reply.tool_calls:
        return (Shape.WHOLE,)
    return (Shape.WHOLE, Shape.CALLS, Shape.TEXT) if reply.content else (Shape.WHOLE, Shape.TEXT)


def surrogate(
    reply: Message, head: Sequence[Message], marker: str, shape: Shape = Shape.WHOLE
) -> list[dict[str, Any]]:
    """Return a short conversation that ends in an assistant turn like ``reply``.

    The turn has as many calls of the same names and ids, and its last word is ``marker``.
    """
    return [
        *(message.to_chat() for message in head),
        {"role": "user", "content": "Xask?"},
        _stand_in(reply, marker, shape),
    ]


def _stand_in(reply: Message, marker: str, shape: Shape) -> dict[str, Any]:
    assistant: dict[str, Any] = {"role": "assistant"}
    if shape is Shape.TEXT or (reply.content and shape is Shape.WHOLE) or not reply.tool_calls:
        assistant["content"] = marker
    if reply.tool_calls and shape is not Shape.TEXT:
        assistant["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": {"x": marker}},
            }
            for call in reply.tool_calls
        ]
    return assistant


def _unused_marker(messages: Sequence[Message]) -> str:
    """Return a word that begins like the marker and stands in none of the messages."""
    used = [
        len(found[0]) for message in messages for found in _MARKERS.finditer(str(message.to_chat()))
    ]
    return MARKER if not used else MARKER[:-1] + "X" * (max(used) - len(MARKER) + 2)


def _around(text: str, marker: str) -> tuple[str, str]:
    """Return the text before the last marker and the text after it."""
    before, found, after = text.rpartition(marker)
    if not found:
        raise SeamError("the template does not render an assistant's text")
    return before, after
