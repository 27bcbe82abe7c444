"""Reading markup as it arrives: a grammar takes text from a feed and waits where it needs more.

A grammar is a generator over a :class:`Feed`. It yields deltas, and ``None`` where it needs more
text to decide what follows. The deltas as a whole do not depend on how the text was cut, because no
method of the feed decides on less text than it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeVar

from bridle.engine.serve.deltas import Content, Delta
from bridle.engine.serve.stopping import partial_suffix

T = TypeVar("T")
Reading = Generator[Delta | None, None, T]
"""A part of a grammar, which yields deltas, waits, and returns a result."""
Emit = Callable[[str], Iterable[Delta]]
"""A function that returns the deltas for the next piece of a text."""


def content(text: str) -> Iterable[Delta]:
    return (Content(text),) if text else ()


class Feed:
    """The text of a reply that has arrived and is not yet read."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False

    def until(self, tags: Sequence[str], emit: Emit | None = None) -> Reading[tuple[str, str]]:
        """Read up to the first of ``tags``, and the tag. Return the text and the tag, which is
        empty at the end of the reply. With ``emit`` the text is emitted piece by piece and not
        returned."""
        read: list[str] = []
        while True:
            found = [(at, tag) for tag in tags if (at := self.text.find(tag)) >= 0]
            at, tag = min(found) if found else (len(self.text), "")
            if not found and not self.ended:
                at -= partial_suffix(self.text, *tags)
            piece, self.text = self.text[:at], self.text[at + len(tag) :]
            if emit is None:
                read.append(piece)
            elif piece:
                yield from emit(piece)
            if tag or self.ended:
                return "".join(read), tag
            yield None

    def accept(self, *starts: str, blanks: bool = True) -> Reading[str]:
        """Read one of ``starts`` and, with ``blanks``, white space before it. Return the text that
        was read. If none of them comes next, nothing is read."""
        while True:
            rest = self.text.lstrip() if blanks else self.text
            for start in starts:
                if rest.startswith(start):
                    read = self.text[: len(self.text) - len(rest) + len(start)]
                    self.text = rest[len(start) :]
                    return read
            if self.ended or not any(start.startswith(rest) for start in starts):
                return ""
            yield None

    def value(self, emit: Emit) -> Reading[bool]:
        """Read a JSON object or array, which must come next, and emit it piece by piece. Return
        whether it was closed before the reply ended."""
        scanner = BracketScanner()
        while True:
            piece = scanner.push(self.text)
            self.text = self.text[len(piece) :]
            if piece:
                yield from emit(piece)
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
        if self.closed:
            return ""
        for position, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.closed = True
                    return text[: position + 1]
        return text


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
        """Whether content has come since the beginning, or since the last call."""

    def push(self, text: str) -> list[Delta]:
        self._feed.text += text
        return self._run()

    def flush(self) -> list[Delta]:
        """Return the remaining deltas at the end of the reply. An unfinished call is judged as it
        stands."""
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
