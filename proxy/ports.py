"""What the proxy's parts need of others: of the store, as its ``Writer`` and ``Reader`` give it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from bridle.store.records import BreakReason, CallBegun, CallEnded, Note, Reward, SessionRecord


class CallWriter(Protocol):
    """Durable writes. Everything raises ``StoreUnavailable`` when it cannot keep."""

    def begin_call(self, begun: CallBegun) -> None:
        """Queues; a failed write shows when the call's end is committed."""
        ...

    def end_call(self, ended: CallEnded) -> asyncio.Future[None]:
        """Queues; the future is done once the call is committed."""
        ...

    async def create_session(self, session: SessionRecord) -> None: ...
    async def seal_session(self, session_id: str, outcome: str, at: float) -> None: ...
    async def explain_break(
        self, call_id: str, reason: BreakReason, notes: Sequence[Note]
    ) -> None: ...
    async def add_reward(self, reward: Reward) -> None: ...


class Versioned(Protocol):
    """Something that serves a policy version."""

    @property
    def version(self) -> int: ...


class SessionReader(Protocol):
    """Look-ups of sessions; blocking, so they are called in a thread."""

    def session(self, session_id: str) -> SessionRecord:
        """Raises ``bridle.store.errors.NotFound``."""
        ...

    def session_by_name(self, name: str) -> SessionRecord | None: ...
    def session_by_key_hash(self, key_hash: str) -> SessionRecord | None: ...
