"""The judgement of a session as rows, for readers with SQL: its calls' kinds, breaks and tokens.

A verdict on each call is stored when the session is sealed, when a person sets a kind, and by
``bridle audit``, which also stores the account of the tokens by the rules. Readers of
:class:`LoadedSession` need no verdict, because it judges the calls that it loads.
"""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection, delete, insert, select

from bridle.reconstruct.session import LoadedSession
from bridle.store.reading.queries import Reader
from bridle.store.schema.accounts import BY_RULES, Fate
from bridle.store.schema.database import transaction
from bridle.store.schema.tables import call_kinds, calls, token_fates
from bridle.store.writing.fates import fate_rows
from bridle.store.writing.sums import resummarize

_COLUMNS = tuple(call_kinds.c.keys())


def judge(reader: Reader, session_id: str) -> None:
    """Judge the calls of a session and store the verdicts.

    Raise :class:`bridle.store.errors.NotFound` if there is no such session.
    """
    store_judgement(LoadedSession.load(reader, session_id))


def store_judgement(session: LoadedSession, account: Mapping[Fate, int] | None = None) -> bool:
    """Store the verdicts on the session's calls, unless they are stored.

    ``account`` is the account of its tokens by the rules. If it is ``None`` and the verdicts are
    new, an earlier account is removed, because it may rest on other kinds.

    Return whether anything was stored.
    """
    verdicts = {
        (call.id, call.kind.value, call.role, call.break_reason and call.break_reason.value)
        for call in session.calls
    }
    with session.reader.engine.connect() as connection:
        judged = _verdicts(connection, session.id) == verdicts
        if judged and account in (None, _account(connection, session.id)):
            return False
    of_session = select(calls.c.id).where(calls.c.session_id == session.id)
    by_rules = token_fates.c.session_id == session.id, token_fates.c.run_id == BY_RULES
    with transaction(session.reader.engine) as connection:
        connection.execute(delete(call_kinds).where(call_kinds.c.call_id.in_(of_session)))
        connection.execute(delete(token_fates).where(*by_rules))
        if verdicts:
            rows = [dict(zip(_COLUMNS, verdict, strict=True)) for verdict in verdicts]
            connection.execute(insert(call_kinds), rows)
        if account:
            rows = fate_rows(account.items(), session_id=session.id, run_id=BY_RULES)
            connection.execute(insert(token_fates), rows)
        resummarize(connection, session.id)
    return True


def _verdicts(connection: Connection, session_id: str) -> set[tuple[str | None, ...]]:
    query = select(call_kinds).join(calls, calls.c.id == call_kinds.c.call_id)
    rows = connection.execute(query.where(calls.c.session_id == session_id))
    return {tuple(row) for row in rows}


def _account(connection: Connection, session_id: str) -> dict[Fate, int]:
    query = select(token_fates.c.fate, token_fates.c.reason, token_fates.c.tokens).where(
        token_fates.c.session_id == session_id, token_fates.c.run_id == BY_RULES
    )
    return {Fate(row.fate, row.reason): row.tokens for row in connection.execute(query)}
