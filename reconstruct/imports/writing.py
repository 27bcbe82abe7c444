"""Record imported sessions in the store."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import orjson

from bridle.reconstruct.imports.turns import ImportedSession, ImportedTurn
from bridle.store.call import CallBegun, CallEnded
from bridle.store.reading.queries import Reader
from bridle.store.records import (
    IDS_MISSING,
    IMPORTED,
    CallKind,
    CallStatus,
    Conversation,
    Note,
    SessionRecord,
    new_id,
)
from bridle.store.reward import Reward
from bridle.store.writing.writer import Writer


@dataclass(slots=True)
class ImportReport:
    """The result of an import."""

    sessions: list[str] = field(default_factory=list)
    """The ids of the sessions that were recorded."""
    calls: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of sessions that were not recorded, by reason."""


def record(
    sessions: Iterable[ImportedSession], form: str, writer: Writer, reader: Reader
) -> ImportReport:
    """Record the sessions that the store does not have, and return what was recorded."""
    report = ImportReport()
    for session in sessions:
        if not session.turns:
            report.left_out["without_reply"] += 1
        elif reader.session_by_name(session.name) is not None:
            report.left_out["already_there"] += 1
        else:
            report.sessions.append(_record(session, form, writer))
            report.calls += len(session.turns)
    return report


def _record(session: ImportedSession, form: str, writer: Writer) -> str:
    now = time.time()
    begun = min((turn.at for turn in session.turns if turn.at is not None), default=now)
    record = SessionRecord(
        new_id("ses"),
        begun,
        harness=session.harness,
        name=session.name,
        labels={IMPORTED: form, **session.labels},
    )
    writer.add_sync(record)
    ids: list[str] = []
    for number, turn in enumerate(session.turns):
        parent = None if turn.continues is None else ids[turn.continues]
        at = begun + number * 1e-3 if turn.at is None else turn.at
        ids.append(_call(record, session, turn, parent, at, form, writer))
    rewards = [Reward(record.id, name, value, now) for name, value in session.rewards.items()]
    writer.add_sync(*rewards)
    writer.update_session_sync(record.id, sealed_at=now, outcome="completed")
    return record.id


def _call(
    record: SessionRecord,
    session: ImportedSession,
    turn: ImportedTurn,
    parent: str | None,
    at: float,
    form: str,
    writer: Writer,
) -> str:
    begun = CallBegun(
        id=new_id("call"),
        session_id=record.id,
        dialect="chat",
        started_at=at,
        stream=False,
        model_requested=turn.model or "unknown",
        parent_call_id=parent,
        lineage_rule=None if parent is None else "content",
        request_body=orjson.dumps([message.to_chat() for message in turn.brought]),
        conversation=Conversation(turn.brought, session.tools, len(turn.brought)),
    )
    usage = {name: value for name, value in turn.usage.items() if value is not None}
    ended = CallEnded(
        id=begun.id,
        session_id=record.id,
        kind=CallKind.MAIN,
        status=CallStatus.COMPLETE,
        model_served=turn.model,
        usage=usage,
        notes=(Note(IMPORTED, form), Note(IDS_MISSING, IMPORTED)),
        ended_at=at,
        response_body=orjson.dumps(turn.reply.to_chat()),
        replies=(turn.reply,),
    )
    writer.begin_call(begun)
    writer.end_call_sync(ended)
    return begun.id
