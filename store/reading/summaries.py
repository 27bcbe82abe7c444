"""Summaries: the texts of a reply that a later conversation may quote."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

SUMMARY_LENGTH: Final = 64
"""Minimum characters of a summary. A reply of this length that a new conversation quotes whole is
the summary of the earlier one."""

_BEGINNINGS: Final = re.compile(r"(?<!\w)\w|[^\w\s]")
"""The places where a quoted text may begin: a word, or any sign that is not part of one."""
_CLOSED: Final = re.compile(r"</(\w+)>\Z")


def openings(text: str) -> Iterator[str]:
    """Yield the first ``SUMMARY_LENGTH`` characters of each text that may be quoted in ``text``.

    Each is yielded once. The cost grows with the length of the text.
    """
    seen: set[str] = set()
    for match in _BEGINNINGS.finditer(text):
        opening = text[match.start() : match.start() + SUMMARY_LENGTH]
        if opening not in seen:
            seen.add(opening)
            yield opening


def quotable(reply: str) -> list[str]:
    """Return ``reply`` and the content of the tag that ends it.

    Each is returned only if it is long enough for a summary. Some harnesses ask for the summary in
    a tag and quote only the tag's content.
    """
    whole = reply.strip()
    texts = [whole]
    closed = _CLOSED.search(whole, max(0, len(whole) - SUMMARY_LENGTH))
    if closed is not None:
        _, opened, rest = whole[: closed.start()].partition(f"<{closed[1]}>")
        texts += [rest.strip()] if opened else []
    return [text for text in texts if len(text) >= SUMMARY_LENGTH]
