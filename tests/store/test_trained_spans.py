"""The trainer's scores of sampled tokens, on both databases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sqlalchemy import func, select, update

from bridle.store.operations.retention import forget
from bridle.store.reading.accounts import trained_spans
from bridle.store.reading.damage import DamagedRows
from bridle.store.schema.database import transaction
from bridle.store.schema.tables import trained_spans as table
from bridle.store.trained import SpanScores
from support.trained import ENTROPY, GAP, trained


@pytest.fixture
def session(writer, calls):
    """A session with one call of four sampled tokens."""
    record = calls.session()
    begun = calls.begun(record)
    writer.add_sync(record)
    writer.begin_call(begun)
    writer.end_call_sync(calls.ended(begun, [1, 2, 3], [4, 5, 6, 7]))
    return record.id, begun.id


def test_scores_are_read_back_to_the_bit(writer, reader, session):
    session_id, call_id = session
    assert trained_spans(reader, [call_id]) == {}
    account = trained(reader, session_id, "a")
    (scores,) = account.scores
    scores.logprobs[1] = scores.entropies[1] = np.nan
    writer.add_sync(account)
    (found,) = trained_spans(reader, [call_id]).values()
    assert (found.run_id, found.step, found.version, found.choice) == ("a", 0, 0, 0)
    (sampled,) = reader.sampled(call_id)
    wanted = sampled.logprobs - GAP
    wanted[1] = np.nan
    assert found.logprobs.tobytes() == wanted.tobytes()
    assert found.entropies[[0, 2, 3]].tolist() == [ENTROPY] * 3
    assert np.isnan(found.entropies[1])


def test_the_last_training_of_a_call_counts_and_a_repeated_step_counts_once(
    writer, reader, session
):
    session_id, call_id = session
    first, second = (trained(reader, session_id, "a", step=step) for step in (0, 1))
    other = trained(reader, session_id, "other", step=0)
    writer.add_sync(first, first)
    writer.add_sync(second, other)
    assert trained_spans(reader, [call_id])[call_id, 0].run_id == "a", (
        "the later one of a transaction counts"
    )
    writer.add_sync(trained(reader, session_id, "b", step=5))
    assert trained_spans(reader, [call_id])[call_id, 0].run_id == "b"
    writer.add_sync(replace(second, scores=()))
    assert trained_spans(reader, [call_id])[call_id, 0].run_id == "b", (
        "an account without scores leaves them"
    )
    with reader.engine.connect() as connection:
        assert connection.execute(select(func.count()).select_from(table)).scalar_one() == 1


def test_scores_go_with_their_session(writer, reader, session):
    session_id, call_id = session
    account = trained(reader, session_id, "a")
    writer.add_sync(account)
    forget(reader.engine, [session_id])
    assert trained_spans(reader, [call_id]) == {}
    writer.add_sync(account)
    assert trained_spans(reader, [call_id]) == {}, "the session is not in the store any more"


def test_a_damaged_row_is_named(writer, reader, session):
    session_id, call_id = session
    writer.add_sync(trained(reader, session_id, "a"))
    with transaction(reader.engine) as connection:
        connection.execute(update(table).values(entropies=b"\x09damaged"))
    with pytest.raises(DamagedRows, match=rf"trained_spans {call_id}/0: column entropies cannot"):
        trained_spans(reader, [call_id])


def test_the_declaration_is_the_row():
    assert [column.name for column in table.primary_key] == ["call_id", "choice"]
    names = {"run_id", "step", *SpanScores.__dataclass_fields__}
    assert {column.name for column in table.c} == names
