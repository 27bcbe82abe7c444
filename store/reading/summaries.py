"""What a later conversation may quote of a reply that summarises an earlier one."""

from __future__ import annotations

import re
from typing import Final

SUMMARY_LENGTH: Final = 64
"""A reply of at least so many characters that a new conversation quotes whole is its summary."""

_CLOSED: Final = re.compile(r"</(\w+)>\Z")


def quotable(reply: str) -> list[str]:
    """``reply``, and what stands in the tag that ends it, for harnesses that ask for the summary in
    one and pass on what is in it; each only when it is long enough for a summary."""
    whole = reply.strip()
    texts = [whole]
    closed = _CLOSED.search(whole, max(0, len(whole) - SUMMARY_LENGTH))
    if closed is not None:
        _, opened, rest = whole[: closed.start()].partition(f"<{closed[1]}>")
        texts += [rest.strip()] if opened else []
    return [text for text in texts if len(text) >= SUMMARY_LENGTH]
