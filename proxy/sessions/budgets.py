"""What a session may spend: calls, sampled tokens, time since it was opened.

A budget is looked at when a call begins; a call that runs may end. The store is the account, so
that every process on it sees the same; calls that run here are added to it, those that run in other
processes are not, so several of these together may overdraw by the calls that they begin at once.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from bridle.proxy.settings import Budget
from bridle.proxy.wire.canonical import ApiError
from bridle.store.reading.queries import Reader
from bridle.store.records import Note, SessionRecord


class Budgets:
    """Every session's budget: its own settings' ``budget`` over the proxy's default."""

    def __init__(self, reader: Reader, default: Budget) -> None:
        self._reader = reader
        self._default = None if default == Budget() else default
        self._running: dict[str, set[str]] = {}
        """Calls that run here, by session."""

    def of(self, session: SessionRecord) -> Budget | None:
        """The session's budget; ``None`` when it has none, so that nothing has to be counted."""
        own = session.settings.get("budget")
        if not own:
            return self._default
        return msgspec.structs.replace(self._default or Budget(), **own)

    async def refusal(self, session: SessionRecord, budget: Budget) -> tuple[ApiError, Note] | None:
        """Why the session's next call is refused, if it is; to be called before :meth:`begin`."""
        if budget.wall_s is not None and time.time() - session.created_at >= budget.wall_s:
            return _exhausted("wall_s", f"{budget.wall_s:g} s of time", session)
        if budget.calls is None and budget.tokens is None:
            return None
        before = tuple(self._running.get(session.id, ()))
        calls, tokens = await asyncio.to_thread(self._reader.spent, session.id, before)
        calls += len(self._running.get(session.id, set()).union(before))
        if budget.calls is not None and calls >= budget.calls:
            return _exhausted("calls", f"{budget.calls} calls", session)
        if budget.tokens is not None and tokens >= budget.tokens:
            return _exhausted("tokens", f"{budget.tokens} sampled tokens", session)
        return None

    def begin(self, session_id: str, call_id: str) -> None:
        """A call of the session runs; pair with :meth:`end`, after its record is committed."""
        self._running.setdefault(session_id, set()).add(call_id)

    def end(self, session_id: str, call_id: str) -> None:
        running = self._running[session_id]
        running.discard(call_id)
        if not running:
            del self._running[session_id]


def _exhausted(name: str, amount: str, session: SessionRecord) -> tuple[ApiError, Note]:
    # Qwen Code repeats a 429 for minutes, but not one that says when its quota is reset.
    message = (
        f"You exceeded your current quota: session {session.id} has used its {amount}, and nothing "
        "but a new session will reset it."
    )
    return ApiError("budget", message, status=429), Note("budget_exhausted", name)
