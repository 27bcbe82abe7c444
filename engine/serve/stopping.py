"""Stop strings, which are found across token boundaries."""

from __future__ import annotations

from collections.abc import Sequence


def partial_suffix(text: str, *tags: str) -> int:
    """Return the length of the longest end of ``text`` that is a proper prefix of a tag."""
    longest = min(len(text), max((len(tag) for tag in tags), default=1) - 1)
    for length in range(longest, 0, -1):
        end = text[-length:]
        if any(len(tag) > length and tag.startswith(end) for tag in tags):
            return length
    return 0


class StopScanner:
    """A filter that lets text through up to the first stop string.

    Text that could be the beginning of a stop string is held back until it is known. The stop
    string that ends first wins, so the outcome does not depend on how the text was cut.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; no text passes after it."""

    def push(self, text: str) -> str:
        if self.matched is not None or not self._stops:
            return text if self.matched is None else ""
        self._held += text
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := self._held.find(stop)) >= 0
        ]
        if found:
            end, start, self.matched = min(found)
            return self._release(end if self._include else start)
        return self._release(len(self._held) - partial_suffix(self._held, *self._stops))

    def flush(self) -> str:
        """Return the held-back text at the end of a reply in which no stop string was found."""
        return "" if self.matched is not None else self._release(len(self._held))

    def _release(self, length: int) -> str:
        released, self._held = self._held[:length], self._held[length:]
        return released
