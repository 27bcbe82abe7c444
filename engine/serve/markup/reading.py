"""Reading markup as it arrives: a grammar takes text from a feed and waits where it needs more.

A grammar is a generator over a :class:`Feed`. It yields deltas, and ``None`` where it needs more
text to decide what follows. The deltas as a whole do not depend on how the text was cut, because no
method of the feed decides on less text than it needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import cache
from typing import Final, TypeVar

from bridle.engine.serve.deltas import Content, Delta
from bridle.engine.serve.stopping import partial_suffix

T = TypeVar("T")
Reading = Generator[Delta | None, None, T]
"""A part of a grammar, which yields deltas, waits, and returns a result."""
Emit = Callable[[str], Iterable[Delta]]
"""A function that returns the deltas for the next piece of a text."""


_BLANKS: Final = re.compile(r"\s*")


@cache
def _first_of(tags: tuple[str, ...]) -> re.Pattern[str]:
    """Find the first of ``tags``; of two at one place, the one that the other begins with."""
    return re.compile("|".join(map(re.escape, sorted(tags))))


def content(text: str) -> Iterable[Delta]:
    return (Content(text),) if text else ()


class Feed:
    """The text of a reply that has arrived and is not yet read.

    An index passes over the text that was read, which is dropped when more arrives: a long text is
    not copied again for each tag in it.
    """

    def __init__(self) -> None:
        self.ended = False
        self._text = ""
        self._at = 0
        """The index at which the unread text begins."""

    def add(self, text: str) -> None:
        """More of the reply."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def unread(self, text: str) -> None:
        """Take back the end of what was just read."""
        self._at -= len(text)

    def until(self, tags: Sequence[str], emit: Emit | None = None) -> Reading[tuple[str, str]]:
        """Read up to the first of ``tags``, and the tag.

        Return the text and the tag, which is empty at the end of the reply. With ``emit`` the text
        is emitted piece by piece and not returned.
        """
        read: list[str] = []
        first = _first_of(tuple(tags)) if tags else None
        while True:
            found = None if first is None else first.search(self._text, self._at)
            start, tag = self._at, "" if found is None else found[0]
            end = len(self._text) if found is None else found.start()
            if found is None and not self.ended:
                longest = max((len(tag) for tag in tags), default=0)
                end -= partial_suffix(self._text[max(start, end - longest) :], *tags)
            piece, self._at = self._text[start:end], end + len(tag)
            if emit is None:
                read.append(piece)
            elif piece:
                yield from emit(piece)
            if tag or self.ended:
                return "".join(read), tag
            yield None

    def accept(self, *starts: str, blanks: bool = True) -> Reading[str]:
        """Read one of ``starts`` and, with ``blanks``, white space before it.

        Return the text that was read. If none of them comes next, nothing is read.
        """
        while True:
            blank = _BLANKS.match(self._text, self._at) if blanks else None
            at = self._at if blank is None else blank.end()
            for start in starts:
                if self._text.startswith(start, at):
                    read = self._text[self._at : at + len(start)]
                    self._at = at + len(start)
                    return read
            rest = self._text[at : at + max(map(len, starts))]
            if self.ended or not any(start.startswith(rest) for start in starts):
                return ""
            yield None

    def value(self, emit: Emit) -> Reading[bool]:
        """Read a JSON object or array, which must come next, and emit it piece by piece.

        Return whether it was closed before the reply ended.
        """
        scanner = BracketScanner()
        while True:
            start, self._at = self._at, scanner.end(self._text, self._at)
            if self._at > start:
                yield from emit(self._text[start : self._at])
            if scanner.closed or self.ended:
                return scanner.closed
            yield None

    def rest(self) -> Reading[None]:
        """Emit everything that is left as content."""
        yield from self.until((), emit=content)


class BracketScanner:
    """A filter that passes text on until the JSON object or array at its beginning has closed."""

    def __init__(self) -> None:
        self.closed = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> str:
        return text[: self.end(text, 0)]

    def end(self, text: str, start: int) -> int:
        """Return the index at which the value ends in ``text[start:]``, or that of the end."""
        if self.closed:
            return start
        for position in range(start, len(text)):
            character = text[position]
            if self._in_string:
                self._in_string = self._stays_in_string(character)
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.closed = True
                    return position + 1
        return len(text)

    def _stays_in_string(self, character: str) -> bool:
        if self._escaped:
            self._escaped = False
            return True
        self._escaped = character == "\\"
        return character != '"'


class MarkupReader:
    """A reader that turns the text of a reply into deltas by a grammar.

    White space before the first call, between calls and after the last one is markup, unless
    content stands beside it.
    """

    def __init__(self, grammar: Callable[[Feed], Reading[None]]) -> None:
        self._feed = Feed()
        self._reading = grammar(self._feed)
        self._blank = ""
        """White space that is markup or content, depending on what follows."""
        self._called = False
        self._spoken = False
        """True if content has come since the beginning, or since the last call."""

    def push(self, text: str) -> list[Delta]:
        self._feed.add(text)
        return self._run()

    def flush(self) -> list[Delta]:
        """Return the remaining deltas at the end of the reply.

        An unfinished call is judged as it stands.
        """
        self._feed.ended = True
        deltas = self._run()
        if not self._called:
            deltas += content(self._blank)
        return deltas

    def _run(self) -> list[Delta]:
        deltas: list[Delta] = []
        for delta in self._reading:
            if delta is None:
                break
            if not isinstance(delta, Content):
                self._blank, self._called, self._spoken = "", True, False
                deltas.append(delta)
            elif not self._spoken and not delta.text.strip():
                self._blank += delta.text
            else:
                deltas.append(Content(self._blank + delta.text))
                self._blank, self._spoken = "", True
        return deltas
