"""Reading a session's recorded calls back into its turns and its token tree."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from msgspec import structs

from bridle.proxy.session.session import Session
from bridle.proxy.session.turn import TRUSTED, Link
from bridle.store.reading.queries import CallRow
from bridle.store.records import CallStatus, Growth, LineageState, Span, is_frozen

log = logging.getLogger("bridle.proxy")


def load_calls(session: Session, calls: Iterable[CallRow], spans: Iterable[Span]) -> None:
    """Add the spans and calls of the session that are in the store and not in memory."""
    session.tree.extend(spans)
    for row in calls:
        if row.status is CallStatus.OPEN or row.id in session.calls:
            continue
        session.calls.add(row.id)
        if row.conversation is not None and row.conversation.lineage is not None:
            _add(session, row, row.conversation.lineage)


def _add(session: Session, row: CallRow, state: LineageState) -> None:
    """Add a call as a turn. Log a call whose state cannot be used."""
    turns = session.turns
    base = turns.turns.get(state.base_call_id or "")
    if base is None and state.base_call_id is not None:
        error = f"call {row.id}: its lineage needs call {state.base_call_id} first"
        fields = {"session": row.session_id, "call": row.id, "error": error}
        log.warning("lineage_state_unusable", extra=fields)
        return
    # Otherwise its echo is recognised and nothing is built on it.
    trusted = row.status in TRUSTED and not is_frozen(row.notes)
    length = row.prompt_tokens
    growth = None if not trusted or length is None else Growth(row.prompt_span_id, ())
    link = Link(state.digests, base=base, choice=state.base_choice)
    replayed = row.replayed_call_id is not None
    turn = session.turn(
        row.id, link, row.status, row.replies, growth, length or 0, replayed=replayed
    )
    turns.add(structs.replace(turn, parent_call_id=row.parent_call_id))
