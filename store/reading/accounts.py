"""The accounts of sampled tokens that the store has (``store/schema/accounts.py``).

:mod:`bridle.reconstruct.accounts` adds those of sessions that nothing has counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from sqlalchemy import (
    CTE,
    ColumnElement,
    CompoundSelect,
    Select,
    and_,
    case,
    exists,
    func,
    literal,
    select,
    union_all,
)

from bridle.store.reading.damage import number_or_none
from bridle.store.reading.queries import Reader
from bridle.store.reading.session_filter import SessionFilter, account_ids, matching
from bridle.store.reading.totals import IS_SUMMED, is_of_another, trained_by
from bridle.store.records import SessionFates
from bridle.store.schema.accounts import HELD_OUT, UNCOUNTED, Fate, account_rows
from bridle.store.schema.derived import session_fates, session_totals
from bridle.store.schema.tables import sessions, token_fates


@dataclass(frozen=True, slots=True)
class WrittenAccount:
    """The account of a session's sampled tokens as it is written in the store."""

    trained_by: str | None
    """The training run that took the session; ``None`` if none did."""
    tokens: Mapping[Fate, int]
    """Number of tokens by fate; ``uncounted`` if the session has no account."""

    @property
    def is_final(self) -> bool:
        """Whether no rules change it: training wrote it, or the session is held out."""
        return self.trained_by is not None or HELD_OUT in self.tokens

    @property
    def uncounted(self) -> int:
        """Number of tokens without an account."""
        return self.tokens.get(UNCOUNTED, 0)


NO_ACCOUNT: Final = WrittenAccount(None, {})


def written_accounts(reader: Reader, wanted: SessionFilter) -> dict[str, WrittenAccount]:
    """Return the accounts of all sessions that match, by id and oldest first.

    With ``wanted.run`` these are the sessions of that run's account, which include those of its
    evaluation and others that it has trained on.
    """
    chosen = matching(wanted, select(sessions.c.id), account=True)
    rows = account_rows(chosen, wanted.run)
    ordered = chosen.order_by(sessions.c.created_at, sessions.c.id)
    with reader.engine.connect() as connection:
        found = dict.fromkeys(connection.execute(ordered).scalars(), NO_ACCOUNT)
        for row in connection.execute(rows):
            fate, tokens = _fate(row), dict(found[row.session_id].tokens)
            tokens[fate] = tokens.get(fate, 0) + int(row.tokens)
            found[row.session_id] = WrittenAccount(row.trained_by, tokens)
    return found


@dataclass(frozen=True, slots=True)
class TokenAccount:
    """The account of the sampled tokens of some sessions: ``captured`` is the sum of ``fates``."""

    sessions: int
    captured: int
    fates: Mapping[Fate, int]
    """Number of tokens by fate, if there are any. ``uncounted`` tokens are those of sessions that
    have no account."""
    written: frozenset[Fate]
    """The fates that the store has, by which sessions can be listed."""

    def __add__(self, other: TokenAccount) -> TokenAccount:
        """Return the account of both sets of sessions, which must have none in common."""
        return TokenAccount(
            self.sessions + other.sessions,
            self.captured + other.captured,
            dict(Counter(dict(self.fates)) + Counter(dict(other.fates))),
            self.written | other.written,
        )

    def of(self, fate: str) -> int:
        """Return the number of tokens of a fate, for any reason."""
        return sum(tokens for one, tokens in self.fates.items() if one.fate == fate)


def stored_account(reader: Reader, wanted: SessionFilter) -> TokenAccount:
    """Return the account of the sessions that match, as far as the store has it.

    It is the sum of the stored accounts of digested sessions, and of the accounts of the others.
    """
    fates: Counter[Fate] = Counter()
    number = unsummed = of_another = 0
    with reader.engine.connect() as connection:
        for row in connection.execute(_sums(wanted)):
            match row.part:
                case "sessions":
                    number, unsummed = int(row.tokens), int(row.tokens) - int(row.summed)
                case "of_another":
                    of_another += 1
                case _:
                    fates[_fate(row)] += int(number_or_none(row.tokens) or 0)
        if unsummed or of_another:
            query = _sums_of_others(wanted, stored=bool(of_another))
            for row in connection.execute(query):
                fates[_fate(row)] += int(number_or_none(row.tokens) or 0)
    return TokenAccount(number, fates.total(), dict(fates), frozenset(fates) - {UNCOUNTED})


def uncounted_sessions(reader: Reader, wanted: SessionFilter, limit: int | None) -> list[str]:
    """Return the sessions that match and have uncounted tokens, oldest first, at most ``limit``."""
    account = _account(wanted)
    rows = account_rows(_others(wanted, account, stored=True), wanted.run).subquery()
    live = select(rows.c.session_id).where(rows.c.fate == UNCOUNTED.fate)
    own = session_fates.c
    stored = exists().where(own.session_id == sessions.c.id, own.fate == UNCOUNTED.fate)
    counted = IS_SUMMED & stored & ~is_of_another(wanted.run)
    query = select(sessions.c.id).join_from(account, sessions, sessions.c.id == account.c.id)
    query = query.where(counted | sessions.c.id.in_(live))
    with reader.engine.connect() as connection:
        ordered = query.order_by(sessions.c.created_at, sessions.c.id).limit(limit)
        return list(connection.execute(ordered).scalars())


def _sums(wanted: SessionFilter) -> CompoundSelect[Any]:
    """Return the sums of the stored accounts by ``part``.

    Sums ``of_another`` run, although ``wanted.run`` has written an account of the same session, are
    a part of their own. The part ``sessions`` has the number of all sessions as its ``tokens``, and
    of those with stored accounts as ``summed``.
    """
    account, own, sums = _account(wanted), session_fates.c, session_totals.c.session_id
    known = (
        select(account.c.id, sums.is_not(None).label("summed"))
        .outerjoin_from(account, session_totals, sums == account.c.id)
        .cte("known")
        .prefix_with("MATERIALIZED")
    )
    part: ColumnElement[str] = literal("account")
    if wanted.run is not None:
        is_other = and_(own.trained_by != wanted.run, trained_by(wanted.run, own.session_id))
        part = case((is_other, "of_another"), else_="account")
    columns = part.label("part"), own.fate, own.reason
    stored = (
        select(*columns, func.sum(own.tokens).label("tokens"), literal(0).label("summed"))
        .join_from(known, session_fates, own.session_id == known.c.id)
        .where(known.c.summed)
        .group_by(*columns)
    )
    summed = func.coalesce(func.sum(case((known.c.summed, 1), else_=0)), 0)
    numbers = select(literal("sessions"), literal(""), literal(""), func.count(), summed)
    return union_all(stored, numbers.select_from(known))


def _sums_of_others(wanted: SessionFilter, *, stored: bool) -> Select[Any]:
    """Return the sums of the accounts of :func:`_others`."""
    rows = account_rows(_others(wanted, _account(wanted), stored=stored), wanted.run).subquery()
    tokens = func.sum(rows.c.tokens).label("tokens")
    return select(rows.c.fate, rows.c.reason, tokens).group_by(rows.c.fate, rows.c.reason)


def _others(wanted: SessionFilter, account: CTE, *, stored: bool) -> Select[Any]:
    """Return the ids of the sessions of ``account`` that have no stored account.

    With ``stored``, they include those whose stored account is that of another run.
    """
    query = select(sessions.c.id).join_from(account, sessions, sessions.c.id == account.c.id)
    return query.where(~IS_SUMMED | is_of_another(wanted.run) if stored else ~IS_SUMMED)


def training_accounts(reader: Reader, session_id: str) -> list[SessionFates]:
    """Return the accounts that training runs have written of a session, the earliest first."""
    query = (
        select(token_fates)
        .where(token_fates.c.session_id == session_id, token_fates.c.run_id != "")
        .order_by(token_fates.c.at, token_fates.c.run_id)
    )
    found: dict[str, SessionFates] = {}
    with reader.engine.connect() as connection:
        for row in connection.execute(query):
            place = (row.step, row.version, number_or_none(row.at) or 0.0)
            empty = SessionFates(session_id, row.run_id, {}, *place)
            account = found.get(row.run_id, empty)
            tokens = {**account.tokens, _fate(row): int(row.tokens)}
            found[row.run_id] = replace(account, tokens=tokens)
    return list(found.values())


def _fate(row: Any) -> Fate:
    """Return a row's fate as text, also where the row is damaged."""
    return Fate(str(row.fate), "" if row.reason is None else str(row.reason))


def _account(wanted: SessionFilter) -> CTE:
    """Return the ids of the sessions of the account, read once for a whole query."""
    return account_ids(wanted).cte("account").prefix_with("MATERIALIZED")
