"""Accounts of sessions' tokens as rows of ``token_fates``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, delete, insert, select

from bridle.store.records import SessionFates
from bridle.store.schema.database import in_pieces
from bridle.store.schema.tables import sessions, token_fates
from bridle.store.writing.sums import account_again


def replace(connection: Connection, accounts: Sequence[SessionFates]) -> None:
    """Write the accounts of training runs.

    Each replaces the run's earlier account of the same session.

    Sessions that are no longer in the store are ignored.
    """
    known = _known(connection, {each.session_id for each in accounts})
    latest = {(e.run_id, e.session_id): e for e in accounts if e.session_id in known}
    for run_id in {each.run_id for each in latest.values()}:
        own = [each.session_id for each in latest.values() if each.run_id == run_id]
        for some in in_pieces(own):
            connection.execute(
                delete(token_fates).where(
                    token_fates.c.run_id == run_id,
                    token_fates.c.session_id.in_(some),
                )
            )
    rows = [
        row
        for each in latest.values()
        for row in fate_rows(
            each.tokens.items(),
            session_id=each.session_id,
            run_id=each.run_id,
            step=each.step,
            version=each.version,
            at=each.at,
        )
    ]
    if rows:
        connection.execute(insert(token_fates), rows)
    account_again(connection, known)


def fate_rows(tokens: Iterable[tuple[tuple[str, str], int]], **place: Any) -> list[dict[str, Any]]:
    """Return one row for each fate and reason; ``place`` holds the other columns."""
    return [
        place | {"fate": fate, "reason": reason, "tokens": number}
        for (fate, reason), number in tokens
    ]


def _known(connection: Connection, ids: set[str]) -> set[str]:
    return {
        one
        for some in in_pieces(sorted(ids))
        for one in connection.execute(
            select(sessions.c.id).where(sessions.c.id.in_(some))
        ).scalars()
    }
