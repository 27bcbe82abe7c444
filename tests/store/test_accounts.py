"""Test which account of a session counts, in both databases."""

from __future__ import annotations

import time
from dataclasses import replace

from bridle.diagnosis.pages import session_lines
from bridle.store.operations.retention import forget
from bridle.store.reading.accounts import stored_account, written_accounts
from bridle.store.reading.session_filter import SessionFilter
from bridle.store.records import RunRecord
from bridle.store.schema.accounts import HELD_OUT, RECORDED_LATER, TRAINED, UNCOUNTED, Fate
from bridle.store.trained import SessionFates

DROPPED = Fate("dropped", "zero_variance")


def record(writer, calls, run, tokens):
    session = calls.session(run_id=run)
    writer.add_sync(session)
    sample(writer, calls, session, tokens)
    return session.id


def sample(writer, calls, session, tokens):
    begun = calls.begun(session)
    writer.begin_call(begun)
    writer.end_call_sync(calls.ended(begun, [1], range(tokens)))


def fates(reader, **wanted):
    return dict(stored_account(reader, SessionFilter(**wanted)).fates)


def test_the_training_that_took_a_session_last_counts_and_a_runs_own_comes_first(
    writer, reader, calls
):
    for run, kind in (("a", "train"), ("a.eval", "eval"), ("b", "train"), ("r", "rollout")):
        writer.add_sync(RunRecord(run, kind, 1.0))
    held_out = record(writer, calls, "a.eval", 2)
    session = record(writer, calls, "r", 3)
    assert fates(reader) == {HELD_OUT: 2, UNCOUNTED: 3}
    earlier = SessionFates(session, "a", {TRAINED: 1, DROPPED: 2}, 0, 1, 10.0)
    later = SessionFates(session, "b", {TRAINED: 3}, 0, 1, 20.0)
    writer.add_sync(later, earlier)
    assert fates(reader) == {HELD_OUT: 2, TRAINED: 3}
    assert fates(reader, run="r") == fates(reader, run="b") == {TRAINED: 3}
    assert fates(reader, run="a") == {HELD_OUT: 2, TRAINED: 1, DROPPED: 2}
    assert written_accounts(reader, SessionFilter(run="a"))[session].trained_by == "a"

    writer.add_sync(replace(earlier, tokens={DROPPED: 3}), replace(earlier, tokens={TRAINED: 3}))
    assert fates(reader, run="a") == {HELD_OUT: 2, TRAINED: 3}, "a repeated step counts once"
    sample(writer, calls, session, 4)
    assert fates(reader) == {HELD_OUT: 2, TRAINED: 3, RECORDED_LATER: 4}
    listed = session_lines(
        reader,
        SessionFilter(run="a", fate="dropped", reason="evaluation"),
        number=lambda _run, _rewards: None,
        limit=9,
    )
    assert [line.record.id for line in listed] == [held_out]


def test_an_account_of_a_session_that_is_gone_is_passed_over(writer, reader, calls):
    kept, gone = (record(writer, calls, None, 2) for _ in range(2))
    forget(reader.engine, [gone])
    writer.add_sync(
        *(SessionFates(one, "a", {TRAINED: 2}, 0, None, time.time()) for one in (gone, kept))
    )
    assert fates(reader) == {TRAINED: 2}
