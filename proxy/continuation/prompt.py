"""What an engine is given as the prompt, and how much of it is still to be rendered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bridle.proxy.lineage.turn import Link
from bridle.store.records import BreakReason, Note, TokenIds


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to send the engine."""

    token_ids: TokenIds | None
    """``uint32``: the exact prompt; ``None``: send the messages, the engine renders them."""
    break_reason: BreakReason | None = None
    tail_token_count: int = 0
    """Ids at the prompt's end that are new, i.e. were rendered now."""
    notes: tuple[Note, ...] = ()


def tail_length(link: Link) -> int:
    """Characters of text that have to be rendered and tokenised for a request that continues
    another, roughly; 0 for one that the engine renders."""
    if link.base is None:
        return 0
    return sum(_length(message.content) for message in link.tail)


def _length(content: str | list[dict[str, Any]] | None) -> int:
    if isinstance(content, list):
        return sum(len(part["text"]) for part in content if part.get("type") == "text")
    return len(content or "")
