"""Reasoning at the beginning of a reply: ``<think>…</think>``."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from typing import Final

from bridle.engine.serve.deltas import Content, Reasoning
from bridle.engine.serve.stopping import partial_suffix

OPEN: Final = "<think>"
CLOSE: Final = "</think>"


class _Place(Enum):
    BEFORE = auto()
    INSIDE = auto()
    AFTER = auto()


class ThinkingParser:
    """Splits a reply's text into reasoning and the rest.

    ``already_open``: the prompt itself ended in ``<think>``, so the reply begins inside. Text that
    does not begin with ``<think>`` (after blanks) is content as a whole.
    """

    def __init__(self, *, already_open: bool = False) -> None:
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
            if started.startswith(OPEN):
                self._place, self._buffer = _Place.INSIDE, started.removeprefix(OPEN)
            elif OPEN.startswith(started):
                return
            else:
                self._place = _Place.AFTER
        if self._place is _Place.INSIDE:
            before, tag, after = self._buffer.partition(CLOSE)
            if not tag:
                safe = len(before) - partial_suffix(before, CLOSE)
                before, after = before[:safe], before[safe:]
            else:
                self._place = _Place.AFTER
            self._buffer = after
            if before:
                yield Reasoning(before)
        if self._place is _Place.AFTER and self._buffer:
            text, self._buffer = self._buffer, ""
            yield Content(text)
