"""The judgement that is stored for readers with SQL: whatever lacks it gets it from the audit."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from sqlalchemy import text

from bridle.reconstruct.audit import audit, audit_session
from bridle.reconstruct.samples.rules import SampleRules
from bridle.reconstruct.verdicts import judge
from bridle.store.reading.accounts import stored_account
from bridle.store.reading.queries import Reader
from bridle.store.reading.session_filter import SessionFilter
from bridle.store.records import CallKind
from bridle.store.schema.accounts import TRAINABLE, UNCOUNTED
from bridle.store.writing.writer import Writer


def kinds(reader: Reader, session: str) -> list[str | None]:
    """The kinds of the session's calls in the order of their start, as SQL reads them."""
    return [call["kind"] for call in reader.judged(session).values()]


def verdicts(reader: Reader) -> int:
    with reader.engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM call_kinds")).scalar_one())


def test_the_audit_judges_a_session_that_was_sealed_without_a_judge(
    reader: Reader, record: Any
) -> None:
    session = record(sealed_at=9.0)
    session.call([1, 2], [3, 4], kind=CallKind.UNKNOWN)
    assert kinds(reader, session.id) == ["unknown"]
    (first,) = audit(reader)
    assert (first.judged, first.clean) == (True, True)
    assert kinds(reader, session.id) == ["main"]
    assert stored_account(reader, SessionFilter()).fates == {TRAINABLE: 2}
    (second,) = audit(reader)
    assert not second.judged


def test_the_audit_judges_a_call_that_ended_after_its_session_was_judged(
    reader: Reader, record: Any
) -> None:
    session = record(sealed_at=9.0)
    first = session.call([1, 2], [3, 4], kind=CallKind.UNKNOWN)
    judge(reader, session.id)
    assert not verdicts(reader) - 1
    session.call([1, 2, 3, 4, 5], [6], parent=first, kind=CallKind.UNKNOWN)
    assert kinds(reader, session.id) == ["main", "unknown"]
    assert audit_session(reader, session.id).judged
    assert kinds(reader, session.id) == ["main", "main"]


def test_a_verdict_that_another_decision_changes_takes_the_account_with_it(
    reader: Reader, writer: Writer, agent: Any
) -> None:
    audit_session(reader, agent.id)
    before = stored_account(reader, SessionFilter()).fates
    main = next(call for call in reader.calls(agent.id) if call.kind is CallKind.MAIN)
    writer.set_kind_sync(main.id, CallKind.SIDE, by="ada")
    judge(reader, agent.id)
    assert UNCOUNTED in stored_account(reader, SessionFilter()).fates
    audit_session(reader, agent.id)
    assert stored_account(reader, SessionFilter()).of("trainable") == before[TRAINABLE] - 2


def test_rules_that_are_only_tried_are_not_stored(reader: Reader, agent: Any) -> None:
    (audited,) = audit(reader, SampleRules(finish_length=False))
    assert not audited.judged
    assert verdicts(reader) == 0


def test_a_store_that_takes_no_verdict_is_audited_and_the_loss_is_logged(
    reader: Reader, agent: Any, caplog: pytest.LogCaptureFixture
) -> None:
    refuse = "CREATE TRIGGER no BEFORE INSERT ON call_kinds BEGIN SELECT RAISE(ABORT, 'no'); END"
    with reader.engine.begin() as connection:
        connection.execute(text(refuse))
    with caplog.at_level(logging.WARNING):
        audited = audit_session(reader, agent.id)
    assert (audited.clean, audited.judged) == (True, False)
    assert "judgement_not_stored" in caplog.text
