"""Accounts of sessions' tokens as rows of ``token_fates``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from sqlalchemy import Connection, delete, insert, select

from bridle.store.declaration import Part, stored
from bridle.store.schema.database import in_pieces
from bridle.store.schema.tables import sessions, token_fates, trained_spans
from bridle.store.trained import SessionFates, SpanScores, TrainedSpan
from bridle.store.writing.sums import account_again


def replace(connection: Connection, accounts: Sequence[SessionFates]) -> None:
    """Write the accounts of training runs, and the scores of the tokens that they trained.

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
    _replace_scores(connection, latest.values())
    account_again(connection, known)


_SCORED: Final = Part(TrainedSpan)


def _replace_scores(connection: Connection, accounts: Iterable[SessionFates]) -> None:
    """Write the scores of trained spans in place of those of the same calls."""
    rows = {
        (scores.call_id, scores.choice): _scored_row(account, scores)
        for account in sorted(accounts, key=lambda account: account.at)
        for scores in account.scores
    }
    for some in in_pieces(sorted({call_id for call_id, _ in rows})):
        connection.execute(delete(trained_spans).where(trained_spans.c.call_id.in_(some)))
    if rows:
        connection.execute(insert(trained_spans), list(rows.values()))


def _scored_row(account: SessionFates, scores: SpanScores) -> dict[str, Any]:
    values = {one.name: getattr(scores, one.name) for one in stored(SpanScores)}
    span = TrainedSpan(**values, run_id=account.run_id, step=account.step)
    return dict(zip(_SCORED.names, _SCORED.row(span), strict=True))


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
