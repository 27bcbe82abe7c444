"""The prompt of a call, and the verdict on whether the engine's own ids continue the parent's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bridle.proxy.session.turn import Link
from bridle.store.records import BreakReason, Growth, Note, TokenIds


@dataclass(frozen=True, slots=True)
class CallPrompt:
    """The prompt that is sent to the engine."""

    token_ids: TokenIds | None
    """The ids of the exact prompt (``uint32``), or ``None`` if the messages are sent and the engine
    renders them."""
    break_reason: BreakReason | None = None
    text: tuple[bytes, ...] | None = None
    """The pieces of the ids as JSON text without brackets, if it is known."""
    tail_token_count: int = 0
    """Number of new ids at the prompt's end, which were rendered now."""
    notes: tuple[Note, ...] = ()
    recorded: bool = False
    """True if the ids are those of a recorded prompt, which need not continue the link's base."""

    def verdict(self, link: Link, growth: Growth) -> tuple[BreakReason | None, tuple[Note, ...]]:
        """Return the reason why the ids do not continue those of the link's base, and the notes.

        The ids are the ones that the engine used, which differ from those that it was sent.
        ``growth`` is their place in the token tree. The reason is ``None`` if they do continue. It
        is ``UNEXPLAINED`` if only the ids show the break; it is then found in the record.
        """
        if link.base is None:
            return link.break_reason, ()
        ignored = self.token_ids is not None and not self.recorded
        notes = (Note("exact_continuation_ignored"),) if ignored else ()
        if link.break_reason is not None:
            return link.break_reason, notes
        tip = link.base.tip(link.choice)
        if tip is None:
            return self.break_reason or BreakReason.PARENT_WITHOUT_IDS, notes
        if growth.shared == tip.end:
            return None, notes
        # The prompt's own reason was known before the engine was asked.
        return self.break_reason or BreakReason.UNEXPLAINED, notes


NO_PROMPT: Final = CallPrompt(None)
"""The prompt of a call whose messages the engine renders."""
