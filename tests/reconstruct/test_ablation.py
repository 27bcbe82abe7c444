"""The counts of ``bridle ablate``, checked by hand on sessions small enough for it."""

import pytest

from bridle.diagnosis.ablation import ablate
from bridle.store.records import BreakReason


@pytest.fixture
def two_turns(record):
    """Branches [1 2 5 6 7 8] and, after a break, [1 9 4]."""
    session = record()
    first = session.call([1, 2], [5, 6])
    session.call([1, 2, 5, 6, 7], [8], parent=first)
    session.call([1, 9], [4], parent=first, break_reason=BreakReason.COMPACTED)
    return session


def test_every_builder_trains_the_same_tokens_and_pays_differently(reader, two_turns):
    data = ablate(reader, batch_rows=2, rows_per_update=2).as_data(parameters=10)
    rows = data["builders"]
    assert [row["tokens_trained"] for row in rows.values()] == [4, 4, 4]
    assert [row["samples"] for row in rows.values()] == [2, 2, 3]
    assert [row["rows"] for row in rows.values()] == [1, 2, 3]
    # tree: 6 + 3 less the shared first token. merged pads 3 to 6. per_call: 4, 6 | 3.
    assert [row["tokens_unique"] for row in rows.values()] == [8, 8, 8]
    assert [row["tokens_repeated"] for row in rows.values()] == [0, 1, 5]
    assert [row["padding"] for row in rows.values()] == [0, 3, 2]
    assert [row["tokens_processed"] for row in rows.values()] == [8, 12, 15]
    assert [row["updates"] for row in rows.values()] == [1, 1, 2]
    assert [row["flops"] for row in rows.values()] == [480, 720, 900]
    assert rows["per_call"]["compute_against_tree"] == 15 / 8
    assert (data["sessions"], data["calls"]) == (1, 3)
    assert data["breaks"] == {"compacted": 1}


def test_the_cost_of_a_row_per_call_grows_with_the_square_of_the_turns(reader, record):
    processed = []
    for turns in (8, 16):
        session, prompt, parent = record(harness=f"h{turns}"), [1], None
        for turn in range(turns):
            parent = session.call(prompt, [100 + turn], parent=parent)
            prompt = [*prompt, 100 + turn, 2]
        rows = ablate(reader, batch_rows=1, harness=f"h{turns}").as_data()["builders"]
        processed.append([rows[name]["tokens_processed"] for name in ("tree", "per_call")])
    assert processed == [[2 * turns, turns * (turns + 1)] for turns in (8, 16)]


def test_an_empty_store_counts_nothing(reader):
    data = ablate(reader).as_data()
    assert data["sessions"] == 0
    assert {row["updates"] for row in data["builders"].values()} == {0}
    assert {row["compute_against_tree"] for row in data["builders"].values()} == {None}


@pytest.mark.damages_store
def test_a_broken_session_is_left_out_and_counted(reader, two_turns, url):
    from bridle.store.schema.database import connect, transaction
    from bridle.store.schema.tables import spans

    engine = connect(url)
    with transaction(engine) as connection:
        connection.execute(spans.delete().where(spans.c.parent_choice.is_(None)))
    engine.dispose()
    data = ablate(reader).as_data()
    assert (data["sessions"], data["left_out"]) == (0, {"session_broken": 1})
