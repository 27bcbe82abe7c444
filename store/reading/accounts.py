"""The account of sampled tokens, as far as the store has it (``store/schema/accounts.py``).

:mod:`bridle.reconstruct.accounts` adds that of sessions which nothing has counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Select, func, select

from bridle.store.reading.pages import SessionFilter, matching
from bridle.store.reading.queries import Reader
from bridle.store.records import SessionFates
from bridle.store.schema.accounts import UNCOUNTED, Fate, account_rows
from bridle.store.schema.tables import calls, sessions, token_fates


@dataclass(frozen=True, slots=True)
class WrittenAccount:
    """Where a session's sampled tokens went, by an account that is written in the store."""

    trained_by: str | None
    """The training run that took the session, if one did."""
    tokens: Mapping[Fate, int]


def written_accounts(reader: Reader, wanted: SessionFilter) -> dict[str, WrittenAccount | None]:
    """The accounts of all sessions that match, by id and oldest first; ``None`` for one that has
    sampled tokens and no account. With ``wanted.run`` these are the sessions of that run's account:
    also those of its evaluation, and those of others that it has trained."""
    rows = account_rows(_chosen(wanted), wanted.run)
    ordered = _chosen(wanted).order_by(sessions.c.created_at, sessions.c.id)
    found: dict[str, WrittenAccount | None] = {}
    with reader.engine.connect() as connection:
        for session_id in connection.execute(ordered).scalars():
            found[session_id] = WrittenAccount(None, {})
        for row in connection.execute(rows):
            fate = Fate(row.fate, row.reason)
            if fate == UNCOUNTED:
                found[row.session_id] = None
                continue
            earlier = found[row.session_id]
            tokens = {} if earlier is None else dict(earlier.tokens)
            tokens[fate] = tokens.get(fate, 0) + int(row.tokens)
            found[row.session_id] = WrittenAccount(row.trained_by, tokens)
    return found


@dataclass(frozen=True, slots=True)
class TokenAccount:
    """Where the sampled tokens of some sessions went: ``captured`` is the sum of ``fates``."""

    sessions: int
    captured: int
    fates: Mapping[Fate, int]
    """Without those of no token. ``uncounted`` are of sessions that have no account."""
    written: frozenset[Fate]
    """Those that the store has, by which sessions can be listed."""

    def __add__(self, other: TokenAccount) -> TokenAccount:
        """The account of both sets of sessions, which have none in common."""
        return TokenAccount(
            self.sessions + other.sessions,
            self.captured + other.captured,
            dict(Counter(dict(self.fates)) + Counter(dict(other.fates))),
            self.written | other.written,
        )

    def of(self, fate: str) -> int:
        """Tokens of a fate, whatever the reason."""
        return sum(tokens for one, tokens in self.fates.items() if one.fate == fate)

    def reasons(self, fate: str) -> dict[str, int]:
        """Tokens of a fate by reason, the most first."""
        found = Counter({one.reason: n for one, n in self.fates.items() if one.fate == fate})
        return dict(found.most_common())


def stored_account(reader: Reader, wanted: SessionFilter) -> TokenAccount:
    """The account of the sessions that match, as far as the store has it."""
    rows = account_rows(_chosen(wanted), wanted.run).subquery()
    tokens = func.sum(rows.c.tokens).label("tokens")
    query = select(rows.c.fate, rows.c.reason, tokens).group_by(rows.c.fate, rows.c.reason)
    chosen = _chosen(wanted).subquery()
    inside = calls.c.session_id.in_(select(chosen.c.id))
    with reader.engine.connect() as connection:
        number = connection.execute(select(func.count()).select_from(chosen)).scalar_one()
        captured = connection.execute(select(func.sum(calls.c.sampled_tokens)).where(inside))
        sampled = int(captured.scalar() or 0)
        fates = {Fate(row.fate, row.reason): int(row.tokens) for row in connection.execute(query)}
    return TokenAccount(number, sampled, fates, frozenset(fates) - {UNCOUNTED})


def uncounted_sessions(reader: Reader, wanted: SessionFilter) -> dict[str, int]:
    """Sampled tokens of the sessions that match and have no account, by id."""
    rows = account_rows(_chosen(wanted), wanted.run).subquery()
    query = select(rows.c.session_id, rows.c.tokens).where(rows.c.fate == UNCOUNTED.fate)
    with reader.engine.connect() as connection:
        return {row.session_id: int(row.tokens) for row in connection.execute(query)}


def training_accounts(reader: Reader, session_id: str) -> list[SessionFates]:
    """What training runs have written of a session, the earliest first."""
    query = (
        select(token_fates)
        .where(token_fates.c.session_id == session_id, token_fates.c.run_id != "")
        .order_by(token_fates.c.at, token_fates.c.run_id)
    )
    found: dict[str, SessionFates] = {}
    with reader.engine.connect() as connection:
        for row in connection.execute(query):
            place = (row.step, row.version, row.at)
            empty = SessionFates(session_id, row.run_id, {}, *place)
            account = found.get(row.run_id, empty)
            tokens = {**account.tokens, Fate(row.fate, row.reason): int(row.tokens)}
            found[row.run_id] = replace(account, tokens=tokens)
    return list(found.values())


def _chosen(wanted: SessionFilter) -> Select[Any]:
    return matching(wanted, select(sessions.c.id), account=True)
