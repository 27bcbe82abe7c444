"""The accounts of sampled tokens that the store has (``store/schema/accounts.py``).

:mod:`bridle.reconstruct.accounts` adds those of sessions that nothing has counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from sqlalchemy import Select, and_, exists, func, select, union_all

from bridle.store.reading.conversation import ReplyId
from bridle.store.reading.damage import DamagedRows, as_stored, mended, number_or_none
from bridle.store.reading.queries import Reader
from bridle.store.reading.session_filter import SessionFilter, conditions_beside_run, matching
from bridle.store.reading.totals import IS_SUMMED, few_listed
from bridle.store.schema.accounts import HELD_OUT, UNCOUNTED, Fate, account_rows, members_of
from bridle.store.schema.columns import unindexed
from bridle.store.schema.database import in_pieces
from bridle.store.schema.derived import session_fates, session_totals
from bridle.store.schema.tables import sessions, token_fates
from bridle.store.schema.tables import trained_spans as scored
from bridle.store.trained import SessionFates, TrainedSpan


@dataclass(frozen=True, slots=True)
class WrittenAccount:
    """The account of a session's sampled tokens as it is written in the store."""

    trained_by: str | None
    """The training run that took the session; ``None`` if none did."""
    tokens: Mapping[Fate, int]
    """Number of tokens by fate; ``uncounted`` if the session has no account."""

    @property
    def is_final(self) -> bool:
        """Return whether no rules change it: training wrote it, or the session is held out."""
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

    captured: int
    fates: Mapping[Fate, int]
    """Number of tokens by fate, if there are any. ``uncounted`` tokens are those of sessions that
    have no account."""
    written: frozenset[Fate]
    """The fates that the store has, by which sessions can be listed."""

    def __add__(self, other: TokenAccount) -> TokenAccount:
        """Return the account of both sets of sessions, which must have none in common."""
        return TokenAccount(
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
    stored = session_fates.c
    with reader.engine.connect() as connection:
        queries: list[Any] = [_stored(wanted, stored.fate, stored.reason, stored.tokens)]
        others = few_listed(connection, _unsummed(wanted))
        if others != []:
            chosen = select(sessions.c.id).where(sessions.c.id.in_(others))
            queries.append(account_rows(chosen, wanted.run))
        for query in queries:
            rows = query.subquery().c
            sums = select(rows.fate, rows.reason, func.sum(rows.tokens).label("tokens"))
            for row in connection.execute(sums.group_by(rows.fate, rows.reason)):
                fates[_fate(row)] += int(number_or_none(row.tokens) or 0)
    return TokenAccount(fates.total(), dict(fates), frozenset(fates) - {UNCOUNTED})


def uncounted_sessions(reader: Reader, wanted: SessionFilter, limit: int | None) -> list[str]:
    """Return the sessions that match and have uncounted tokens, oldest first, at most ``limit``."""
    live = account_rows(_unsummed(wanted), wanted.run).subquery().c
    stored = _stored(wanted, session_fates.c.session_id)
    stored = stored.where(session_fates.c.fate == UNCOUNTED.fate)
    uncounted = union_all(select(live.session_id).where(live.fate == UNCOUNTED.fate), stored)
    query = select(sessions.c.id).where(sessions.c.id.in_(uncounted))
    with reader.engine.connect() as connection:
        ordered = query.order_by(sessions.c.created_at, sessions.c.id).limit(limit)
        return list(connection.execute(ordered).scalars())


def _stored(wanted: SessionFilter, *columns: Any) -> Select[Any]:
    """Return the query of columns of the stored accounts of the sessions that match."""
    own, account = session_fates.c, wanted.run or ""
    query = select(*columns)
    if not conditions_beside_run(wanted):
        return query.where(own.account == account)
    ids = matching(wanted, select(sessions.c.id), account=True)
    chosen = ids.cte("chosen_sessions").prefix_with("MATERIALIZED")
    of_session = and_(own.session_id == chosen.c.id, unindexed(own.account) == account)
    return query.join_from(chosen, session_fates, of_session)


def _unsummed(wanted: SessionFilter) -> Select[Any]:
    """Return the query of the ids of the sessions that match and have no stored sums."""
    query = select(sessions.c.id).where(~IS_SUMMED)
    if wanted.run is None or conditions_beside_run(wanted):
        return matching(wanted, query, account=True)
    own, trained = members_of(wanted.run)
    summed = select(session_totals.c.session_id).where(
        session_totals.c.session_id == token_fates.c.session_id
    )
    trained = trained.where(~exists(summed))
    return select(own.where(~IS_SUMMED).union(trained).subquery().c.id)


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


def trained_spans(reader: Reader, call_ids: Iterable[str]) -> dict[ReplyId, TrainedSpan]:
    """Return the trainer's scores of the sampled tokens of calls, by reply.

    Replies that were not trained are left out. Raise
    :class:`bridle.store.reading.damage.DamagedRows` if a row cannot be read.
    """
    found: dict[ReplyId, TrainedSpan] = {}
    with reader.engine.connect() as connection:
        for some in in_pieces(sorted(set(call_ids))):
            query = select(*as_stored(scored)).where(scored.c.call_id.in_(some))
            for row in connection.execute(query):
                values, damage = mended(scored, row)
                if damage:
                    raise DamagedRows(damage)
                found[ReplyId(values["call_id"], values["choice"])] = TrainedSpan(**values)
    return found


def _fate(row: Any) -> Fate:
    """Return a row's fate as text, also where the row is damaged."""
    return Fate(str(row.fate), "" if row.reason is None else str(row.reason))
