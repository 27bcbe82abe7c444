"""Reasoning at the beginning of a reply, between two tags: ``<think>…</think>`` for most models."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto

from bridle.engine.contract.markup import THINK, ReasoningMarkup
from bridle.engine.serve.deltas import Content, Reasoning
from bridle.engine.serve.stopping import partial_suffix


class _Place(Enum):
    BEFORE = auto()
    INSIDE = auto()
    AFTER = auto()


class ThinkingParser:
    """A parser that splits a reply's text into reasoning and the rest.

    With ``already_open``, the prompt itself ended in the opening tag, so the reply begins with
    reasoning. Otherwise, text that does not begin with that tag (after blanks) is content as a
    whole.
    """

    def __init__(self, markup: ReasoningMarkup = THINK, *, already_open: bool = False) -> None:
        self._opening, self._closing = markup.opening, markup.closing
        self._place = _Place.INSIDE if already_open else _Place.BEFORE
        self._buffer = ""

    def push(self, text: str) -> list[Content | Reasoning]:
        self._buffer += text
        return [*self._drain()]

    def flush(self) -> list[Content | Reasoning]:
        rest, self._buffer = self._buffer, ""
        if not rest:
            return []
        return [Reasoning(rest) if self._place is _Place.INSIDE else Content(rest)]

    def _drain(self) -> Iterator[Content | Reasoning]:
        if self._place is _Place.BEFORE:
            started = self._buffer.lstrip()
            if started.startswith(self._opening):
                self._place, self._buffer = _Place.INSIDE, started.removeprefix(self._opening)
            elif self._opening.startswith(started):
                return
            else:
                self._place = _Place.AFTER
        if self._place is _Place.INSIDE:
            before, tag, after = self._buffer.partition(self._closing)
            if not tag:
                safe = len(before) - partial_suffix(before, self._closing)
                before, after = before[:safe], before[safe:]
            else:
                self._place = _Place.AFTER
            self._buffer = after
            if before:
                yield Reasoning(before)
        if self._place is _Place.AFTER and self._buffer:
            text, self._buffer = self._buffer, ""
            yield Content(text)
