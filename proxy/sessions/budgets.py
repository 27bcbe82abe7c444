"""What a session may spend: calls, sampled tokens, time since it was opened.

A budget is looked at when a call begins; a call that runs may end. The store is the account, so
that every process on it sees the same; calls that run here are added to it, those that run in other
processes are not, so several of these together may overdraw by the calls that they begin at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from bridle.proxy.sessions.session import Session
from bridle.proxy.settings import Budget
from bridle.proxy.wire.canonical import ApiError
from bridle.store.reading.queries import Reader
from bridle.store.records import Note, SessionRecord


class Budgets:
    """Every session's budget: its own settings' ``budget`` over the proxy's default."""

    def __init__(self, reader: Reader, default: Budget) -> None:
        self._reader = reader
        self.default = None if default == Budget() else default
        """Of sessions that have no settings of their own; ``None`` when there is none."""

    def of(self, settings: Mapping[str, Any]) -> Budget | None:
        """The budget of a session with such settings, or ``None`` when it has none."""
        own = settings.get("budget")
        if not own:
            return self.default
        return msgspec.structs.replace(self.default or Budget(), **own)

    async def refusal(self, session: Session, budget: Budget) -> tuple[ApiError, Note] | None:
        """Why the session's next call is refused, if it is; ask before the call begins."""
        record = session.record
        if budget.wall_s is not None and time.time() - record.created_at >= budget.wall_s:
            return _exhausted("wall_s", f"{budget.wall_s:g} s of time", record)
        if budget.calls is None and budget.tokens is None:
            return None
        before = tuple(session.running)
        calls, tokens = await asyncio.to_thread(self._reader.spent, session.id, before)
        calls += len(session.running.union(before))
        if budget.calls is not None and calls >= budget.calls:
            return _exhausted("calls", f"{budget.calls} calls", record)
        if budget.tokens is not None and tokens >= budget.tokens:
            return _exhausted("tokens", f"{budget.tokens} sampled tokens", record)
        return None


def _exhausted(name: str, amount: str, session: SessionRecord) -> tuple[ApiError, Note]:
    # Qwen Code repeats a 429 for minutes, but not one that tells when its quota is reset.
    message = (
        f"You exceeded your current quota: session {session.id} has used its {amount}, and nothing "
        "but a new session will reset it."
    )
    return ApiError("budget", message, status=429), Note("budget_exhausted", name)
