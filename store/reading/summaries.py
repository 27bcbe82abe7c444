"""Summaries: the texts of a reply that a later conversation may quote."""

from __future__ import annotations

import re
from typing import Final

SUMMARY_LENGTH: Final = 64
"""Minimum characters of a summary. A reply of this length that a new conversation quotes whole is
the summary of the earlier one."""

_CLOSED: Final = re.compile(r"</(\w+)>\Z")


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
