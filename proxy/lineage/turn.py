"""One recorded call as lineage knows it: what was asked, what was answered, and in which tokens.

Turns form two trees that mostly coincide. The *parent* is the call that a request continues in
meaning. The *base* is the deepest call whose whole conversation, reply included, stands unchanged
at the start of the request; a turn keeps digests only of what came after its base, so a session
costs memory in proportion to its own length. Parent and base differ exactly where the lineage
broke, and the break has a reason.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from bridle.proxy.lineage.digests import digest_of, unfolded
from bridle.store.records import (
    BreakReason,
    CallStatus,
    LineageState,
    Message,
    RequestDigests,
    TokenIds,
)
from bridle.store.tree import common_prefix


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """One sampled sequence of a call."""

    message: Message
    """The reply in chat shape, tool-call ids as the client was sent them."""
    token_ids: TokenIds
    """``uint32[T]``, the engine's own, stop token included when there is one."""
    finish_reason: str | None = None
    digest: bytes = b""


class Turn(msgspec.Struct, frozen=True, eq=False):
    """One recorded call: from :meth:`of` when it is over, from :meth:`from_state` at restart."""

    call_id: str
    parent_call_id: str | None
    status: CallStatus
    seen: RequestDigests
    base: Turn | None = None
    base_choice: int = 0
    choices: tuple[Sampled, ...] = ()
    shared: int = 0
    """How many tokens of the base's path (its prompt and reply) this prompt begins with."""
    own_ids: TokenIds | None = None
    """``uint32``: the prompt ids after the shared ones; ``None`` when the engine told no ids."""
    differs: tuple[str, ...] = ()
    """What the harness wrote differently along this conversation, so far."""
    confidence: float = 1.0
    retry_of: str | None = None

    def __repr__(self) -> str:
        return f"Turn({self.call_id!r})"  # its bases are as many as the conversation is long

    @classmethod
    def of(
        cls,
        call_id: str,
        link: Link,
        *,
        status: CallStatus,
        choices: Sequence[Sampled] = (),
        prompt_token_ids: TokenIds | Sequence[int] | None = None,
    ) -> Turn:
        """The turn of a call that was admitted with ``link`` and is now over.

        ``choices`` are the replies as sampled (none when the call failed), ``prompt_token_ids`` the
        ids that the engine says it used. Of a quarantined call give the replies but no prompt ids:
        it is recognised when it is echoed, and nothing is built on it.
        """
        shared, own_ids = _share(link.base, link.choice, prompt_token_ids)
        return cls(
            call_id=call_id,
            parent_call_id=link.parent.call_id if link.parent is not None else None,
            status=status,
            seen=link.seen,
            base=link.base,
            base_choice=link.choice if link.base is not None else 0,
            choices=tuple(
                Sampled(
                    choice.message,
                    np.asarray(choice.token_ids, dtype=np.uint32),
                    choice.finish_reason,
                    digest_of(unfolded(choice.message)),
                )
                for choice in choices
            ),
            shared=shared,
            own_ids=own_ids,
            differs=link.differs,
            confidence=link.confidence,
            retry_of=link.retry_of,
        )

    @property
    def prompt_token_ids(self) -> TokenIds | None:
        """``uint32[P]`` as the engine used them, put together from the path."""
        return None if self.own_ids is None else np.concatenate(self._prompt_pieces())

    def _prompt_pieces(self) -> list[TokenIds]:
        """The prompt's ids as the turns of its path hold them, in order; at least one piece."""
        pieces: list[TokenIds] = []
        turn, wanted = self, self.prompt_length
        while True:
            if turn.own_ids is not None and wanted > turn.shared:
                pieces.append(turn.own_ids[: wanted - turn.shared])
                wanted = turn.shared
            if wanted == 0 or turn.base is None:
                break
            length = turn.base.prompt_length
            if wanted > length:
                sampled = turn.base.choices[turn.base_choice].token_ids
                pieces.append(sampled[: wanted - length])
                wanted = length
            turn = turn.base
        return pieces[::-1] or [np.empty(0, np.uint32)]

    @property
    def prompt_length(self) -> int:
        """Tokens in the prompt; 0 when the engine told no ids."""
        return 0 if self.own_ids is None else self.shared + len(self.own_ids)

    def path_ids(self, choice: int = 0) -> TokenIds | None:
        """``uint32``: prompt and reply of one choice; ``None`` when either has no ids."""
        pieces = self.path_pieces(choice)
        return None if pieces is None else np.concatenate(pieces)

    def path_pieces(self, choice: int = 0) -> list[TokenIds] | None:
        """:meth:`path_ids` in pieces, for who puts more behind them; the last is the reply."""
        if self.own_ids is None or choice >= len(self.choices):
            return None
        sampled = self.choices[choice].token_ids
        return [*self._prompt_pieces(), sampled] if len(sampled) else None

    @classmethod
    def from_state(
        cls,
        state: LineageState,
        *,
        call_id: str,
        parent_call_id: str | None,
        status: CallStatus,
        base: Turn | None,
        choices: Sequence[Sampled] = (),
        prompt_token_ids: TokenIds | Sequence[int] | None = None,
    ) -> Turn:
        """The turn of a recorded call: :meth:`Link.state` was stored when it was admitted.

        ``base`` is the turn of ``state.base_call_id``. Raises ``ValueError`` when it is another.
        """
        if state.base_call_id != (base.call_id if base is not None else None):
            raise ValueError(f"call {call_id}: its lineage needs call {state.base_call_id} first")
        link = Link(
            seen=state.digests,
            base=base,
            choice=state.base_choice,
            differs=state.differs,
            confidence=state.confidence,
            retry_of=state.retry_of,
        )
        turn = cls.of(
            call_id, link, status=status, choices=choices, prompt_token_ids=prompt_token_ids
        )
        return msgspec.structs.replace(turn, parent_call_id=parent_call_id)


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
        """What the store keeps of it; :meth:`Turn.from_state` reads it."""
        base = self.base
        return LineageState(
            self.seen,
            None if base is None else base.call_id,
            0 if base is None else self.choice,
            self.differs,
            self.confidence,
            self.retry_of,
        )


def _share(
    base: Turn | None, choice: int, prompt_token_ids: TokenIds | Sequence[int] | None
) -> tuple[int, TokenIds | None]:
    """How many ids the prompt shares with the base's path, and its own ids after them."""
    if prompt_token_ids is None:
        return 0, None
    prompt = np.asarray(prompt_token_ids, dtype=np.uint32)
    path = base.path_ids(choice) if base is not None else None
    if path is None:
        return 0, prompt
    shared = common_prefix(path, prompt)
    return shared, prompt[shared:].copy()
