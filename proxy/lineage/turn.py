"""One recorded call as lineage knows it: what was asked, what was answered, and where its tokens
stand in the session's token tree.

Turns form two trees that mostly coincide. The *parent* is the call that a request continues in
meaning. The *base* is the deepest call whose whole conversation, reply included, stands unchanged
at the start of the request; a turn keeps digests only of what came after its base, so a session
costs memory in proportion to its own length. Parent and base differ exactly where the lineage
broke, and the break has a reason.
"""

from __future__ import annotations

from typing import Final

import msgspec

from bridle.store.records import (
    BreakReason,
    CallKind,
    CallStatus,
    LineageState,
    Message,
    Note,
    RequestDigests,
    TokenIds,
)
from bridle.store.tree import Node, Point, path_ids

_CUT: Final = frozenset({CallStatus.FAILED, CallStatus.PARTIAL, CallStatus.INTERRUPTED})
"""The statuses after which a client sends its request again."""

TRUSTED: Final = frozenset({CallStatus.COMPLETE, CallStatus.PARTIAL})
"""The statuses of calls whose tokens later calls may continue, contradictions excepted."""


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """One sampled sequence of a call."""

    message: Message
    """The reply in chat shape, tool-call ids as the client was sent them."""
    digest: bytes
    form: bytes
    """What it says, and how it is written when it is echoed as it is."""
    node: Node | None = None
    """Its tokens; ``None`` when nothing can be built on them."""


class Turn(msgspec.Struct, frozen=True, eq=False):
    """One recorded call, when it is over."""

    call_id: str
    session_id: str
    parent_call_id: str | None
    status: CallStatus
    seen: RequestDigests
    base: Turn | None = None
    base_choice: int = 0
    choices: tuple[Sampled, ...] = ()
    prompt: Point | None = None
    """Where its prompt ends; ``None`` when the engine reported no ids, or when the record is not
    to be trusted: then its echo is recognised, and nothing is built on it."""
    differs: tuple[str, ...] = ()
    """What the harness wrote differently along this conversation, so far."""
    confidence: float = 1.0
    retry_of: str | None = None

    def __repr__(self) -> str:
        return f"Turn({self.call_id!r})"  # its bases are as many as the conversation is long

    @property
    def prompt_length(self) -> int:
        """Tokens in the prompt; 0 when its ids are not known."""
        return 0 if self.prompt is None else self.prompt.position

    def tip(self, choice: int = 0) -> Node | None:
        """Where prompt and reply of one choice end; ``None`` when either has no ids."""
        if self.prompt is None or choice >= len(self.choices):
            return None
        node = self.choices[choice].node
        return node if node is not None and len(node.token_ids) else None

    def path_ids(self, choice: int = 0) -> TokenIds | None:
        """``uint32``: prompt and reply of one choice; ``None`` when either has no ids."""
        tip = self.tip(choice)
        return None if tip is None else path_ids(tip, tip.end)


class Link(msgspec.Struct, frozen=True):
    """Where a request belongs in its session."""

    seen: RequestDigests
    parent: Turn | None = None
    """The call that the request continues in meaning."""
    base: Turn | None = None
    """The deepest call whose conversation stands unchanged at the request's start: the parent,
    unless the lineage broke."""
    choice: int = 0
    """Which of the base's replies is continued."""
    rule: str | None = None
    """``minted_id``, ``content`` or ``token_prefix``."""
    differs: tuple[str, ...] = ()
    confidence: float = 1.0
    """1.0 when an echoed id names the parent; less the more is inferred."""
    tail: tuple[Message, ...] = ()
    """The request's messages after the base's reply; all of them when there is no base."""
    break_reason: BreakReason | None = None
    retry_of: str | None = None
    """An earlier call that asked the same and failed, was cut, or has not been echoed so far."""
    retry_after: CallStatus | None = None
    """How that call ended."""
    dropped: str | None = None
    """An earlier call whose question the request repeats and goes on from without its reply."""
    unknown: tuple[str, ...] = ()
    """Call ids that the request echoes and this session's memory does not hold: calls that are
    still running here, or that another worker recorded."""

    def state(self) -> LineageState:
        """What the store keeps of it; :func:`link_of` reads it."""
        base = self.base
        return LineageState(
            self.seen,
            None if base is None else base.call_id,
            0 if base is None else self.choice,
            self.differs,
            self.confidence,
            self.retry_of,
        )

    def kind(self) -> CallKind:
        """As far as lineage can say. An earlier call that ended well and was asked again may be a
        sample beside this one, so that is no retry."""
        if self.seen.agent is not None:
            return CallKind.SUBAGENT
        return CallKind.RETRY if self.retry_after in _CUT else CallKind.UNKNOWN

    def notes(self, status: CallStatus) -> tuple[Note, ...]:
        """The evidence for a retry (the earlier call, and how it ended), and on an answered call
        the one whose reply the harness went on without."""
        notes: tuple[Note, ...] = ()
        if self.retry_of is not None and self.retry_after is not None:
            name = "retry" if self.retry_after in _CUT else "asked_again"
            notes = (Note(name, f"{self.retry_of} {self.retry_after}"),)
        if self.dropped is not None and status in TRUSTED:
            notes += (Note("reply_dropped", self.dropped),)
        return notes


def link_of(state: LineageState, call_id: str, base: Turn | None) -> Link:
    """The link of a recorded call, whose :meth:`Link.state` was stored.

    ``base`` is the turn of ``state.base_call_id``. Raises ``ValueError`` when it is another.
    """
    if state.base_call_id != (base.call_id if base is not None else None):
        raise ValueError(f"call {call_id}: its lineage needs call {state.base_call_id} first")
    return Link(
        seen=state.digests,
        base=base,
        choice=state.base_choice,
        differs=state.differs,
        confidence=state.confidence,
        retry_of=state.retry_of,
    )
