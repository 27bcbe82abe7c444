"""One recorded call as lineage knows it: what was asked, what was answered, and where its tokens
stand in the session's token tree.

Turns form two trees that mostly coincide. The *parent* is the call that a request continues in
meaning. The *base* is the deepest call whose whole conversation, reply included, stands unchanged
at the start of the request; a turn keeps digests only of what came after its base, so a session
costs memory in proportion to its own length. Parent and base differ exactly where the lineage
broke, and the break has a reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from bridle.proxy.wire.canonical import Message, ToolCall
from bridle.store.records import BreakReason, CallKind, CallStatus, Note, TokenIds
from bridle.store.tree import Node, Point, path_ids

STATE_VERSION = 1

_CUT: Final = frozenset({CallStatus.FAILED, CallStatus.PARTIAL, CallStatus.INTERRUPTED})
"""The statuses after which a client sends its request again."""

TRUSTED: Final = frozenset({CallStatus.COMPLETE, CallStatus.PARTIAL})
"""The statuses of calls whose tokens later calls may continue, contradictions excepted."""


class Seen(msgspec.Struct, frozen=True, gc=False):
    """What a request said, in digests."""

    system: bytes
    """The leading system messages (16 bytes, like every digest here)."""
    system_form: bytes
    tools: bytes
    ask: bytes
    """What else makes two requests the same question: tool choice and response format."""
    units: tuple[bytes, ...]
    """Digests of the steps after the base's reply (all steps when there is no base)."""
    forms: tuple[bytes, ...]
    """How these steps were written, one each."""
    depth: int
    """How many steps the whole request had, those before the base's reply included."""
    agent: str | None = None
    """The harness' own name of the (sub-)agent, when its headers tell one."""
    arguments: str | None = None
    """What the chat template was given beside messages and tools, as JSON; ``None``: nothing."""


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
    seen: Seen
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

    def to_state(self) -> dict[str, Any]:
        """JSON for ``calls.conversation``. Ids and messages are in the store's other columns.

        Others may read ``differs``, ``confidence`` and ``retry_of`` here. A retry is only what it
        looked like when it was asked: when the earlier call has children, both were samples.
        """
        seen = self.seen
        return {
            "version": STATE_VERSION,
            "base": self.base.call_id if self.base is not None else None,
            "choice": self.base_choice,
            "system": seen.system.hex(),
            "system_form": seen.system_form.hex(),
            "tools": seen.tools.hex(),
            "ask": seen.ask.hex(),
            "units": b"".join(seen.units).hex(),
            "forms": b"".join(seen.forms).hex(),
            "depth": seen.depth,
            "agent": seen.agent,
            "arguments": seen.arguments,
            "differs": list(self.differs),
            "confidence": self.confidence,
            "retry_of": self.retry_of,
        }


class Link(msgspec.Struct, frozen=True):
    """Where a request belongs in its session."""

    seen: Seen
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


def message_from_chat(chat: Mapping[str, Any]) -> Message:
    """The inverse of :meth:`proxy.wire.canonical.Message.to_chat`, for ``calls.message``."""
    return Message(
        role=chat["role"],
        content=chat.get("content"),
        reasoning=chat.get("reasoning"),
        tool_calls=tuple(
            ToolCall(
                id=call["id"],
                name=call["function"]["name"],
                arguments=call["function"]["arguments"],
            )
            for call in chat.get("tool_calls") or ()
        ),
        tool_call_id=chat.get("tool_call_id"),
        name=chat.get("name"),
    )


def link_of(state: Mapping[str, Any], call_id: str, base: Turn | None) -> Link:
    """The link of a recorded call from what :meth:`Turn.to_state` made of it.

    ``base`` is the turn named by ``state["base"]``. Raises ``ValueError`` for a state that an
    incompatible version wrote, or when ``base`` is not that turn.
    """
    if state.get("version") != STATE_VERSION:
        raise ValueError(f"call {call_id}: unknown lineage state {state.get('version')!r}")
    if state["base"] != (base.call_id if base is not None else None):
        raise ValueError(f"call {call_id}: its lineage state needs call {state['base']} first")
    seen = Seen(
        system=bytes.fromhex(state["system"]),
        system_form=bytes.fromhex(state["system_form"]),
        tools=bytes.fromhex(state["tools"]),
        ask=bytes.fromhex(state["ask"]),
        units=_cut(state["units"]),
        forms=_cut(state["forms"]),
        depth=state["depth"],
        agent=state["agent"],
        arguments=state.get("arguments"),
    )
    return Link(
        seen=seen,
        base=base,
        choice=state["choice"],
        differs=tuple(state["differs"]),
        confidence=state["confidence"],
        retry_of=state["retry_of"],
    )


def _cut(digests: str) -> tuple[bytes, ...]:
    packed = bytes.fromhex(digests)
    return tuple(packed[at : at + 16] for at in range(0, len(packed), 16))
