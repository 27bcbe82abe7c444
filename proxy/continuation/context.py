"""How a call relates to the calls before it: its kind, its retries, and why it broke."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from bridle.proxy.continuation.breaks import explain
from bridle.proxy.continuation.prompt import Prompt
from bridle.proxy.lineage.turn import Link
from bridle.proxy.wire.canonical import Request
from bridle.store.records import (
    ALSO_BROKE_ON,
    BreakReason,
    CallKind,
    CallStatus,
    Note,
    TokenIds,
)

if TYPE_CHECKING:
    from bridle.proxy.continuation.continuation import Continuer

_CUT: Final = frozenset({CallStatus.FAILED, CallStatus.PARTIAL, CallStatus.INTERRUPTED})
"""The statuses after which a client sends its request again."""

TRUSTED: Final = frozenset({CallStatus.COMPLETE, CallStatus.PARTIAL})
"""The statuses of calls whose tokens later calls may continue, contradictions excepted."""


class CallContext(msgspec.Struct, frozen=True):
    """How a call hangs together with the calls before it."""

    link: Link
    prompt: Prompt
    continuer: Continuer | None

    def kind(self) -> CallKind:
        """As far as lineage can tell. An earlier call that ended well and was asked again may be
        a sample beside it, so that is no retry."""
        if self.link.seen.agent is not None:
            return CallKind.SUBAGENT
        return CallKind.RETRY if self.link.retry_after in _CUT else CallKind.UNKNOWN

    def retry(self) -> tuple[Note, ...]:
        """The evidence for a retry: the earlier call, and how it ended."""
        link = self.link
        if link.retry_of is None or link.retry_after is None:
            return ()
        name = "retry" if link.retry_after in _CUT else "asked_again"
        return (Note(name, f"{link.retry_of} {link.retry_after}"),)

    def left_out(self, status: CallStatus) -> tuple[Note, ...]:
        """Whose reply the harness went on without; told by the call that was answered, not by each
        attempt at it."""
        if self.link.dropped is None or status not in TRUSTED:
            return ()
        return (Note("reply_dropped", self.link.dropped),)

    def judged(
        self, request: Request, used: Sequence[int] | TokenIds | None
    ) -> tuple[BreakReason | None, tuple[Note, ...]]:
        """Why the prompt ids that the engine ``used`` do not continue the parent's, if they do not,
        and whether the engine passed over the ids that it was given."""
        link, given = self.link, self.prompt.token_ids
        if used is None or link.base is None:
            return link.break_reason, ()
        if given is not None and np.array_equal(given, np.asarray(used, dtype=np.uint32)):
            return link.break_reason, ()
        notes: tuple[Note, ...] = ()
        if given is not None:
            notes = (Note("exact_continuation_ignored"),)
        tokenizer = None if self.continuer is None else self.continuer.tokenizer
        reasons = explain(tokenizer, link, request, used)
        if not reasons or link.break_reason is not None:
            return link.break_reason, notes
        if self.prompt.break_reason is not None:
            # It was known before the engine was asked why the history would be rendered.
            return self.prompt.break_reason, notes
        first, *others = reasons
        if tokenizer is None:
            notes += (Note("break_reason_inferred", first.value),)
        return first, (*notes, *(Note(ALSO_BROKE_ON, reason.value) for reason in others))
