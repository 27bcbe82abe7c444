"""The audit must catch what it is there to catch, in the store and in the samples."""

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs
from sqlalchemy import event, insert, select, update
from sqlalchemy.exc import IntegrityError

from bridle.reconstruct.audit import Findings, audit, audit_session, check_samples
from bridle.reconstruct.episodes import episode_of
from bridle.reconstruct.samples.builders import build
from bridle.reconstruct.samples.rules import DEFAULT_RULES
from bridle.reconstruct.session import LoadedSession
from bridle.reconstruct.tree import BrokenTree
from bridle.store.encoding.packing import (
    EXPONENTS,
    HALVES,
    pack_ids,
    pack_logprobs,
    unpack_ids,
    unpack_logprobs,
)
from bridle.store.records import CallStatus, VersionRun
from bridle.store.schema.database import connect, transaction
from bridle.store.schema.tables import bodies, call_messages, calls, spans
from bridle.store.writing.rows import OBSERVED

pytestmark = pytest.mark.damages_store


@pytest.fixture
def change(url):
    """``change(statement)`` behind the writer's back."""
    engine = connect(url)

    def run(*statements):
        with transaction(engine) as connection:
            for statement in statements:
                connection.execute(statement)

    yield run
    engine.dispose()


def columns(reader, table, condition):
    """The rows that meet a condition, as plain dictionaries."""
    with reader.engine.connect() as connection:
        return [dict(row) for row in connection.execute(select(table).where(condition)).mappings()]


def this(call_id, choice):
    """The condition that names a span."""
    place = OBSERVED if choice is None else choice
    return (spans.c.call_id == call_id) & (spans.c.choice == place)


def rules(reader, session):
    return {violation.rule for violation in audit_session(reader, session.id).violations}


def test_what_the_writer_wrote_is_clean(reader, agent):
    for builder in ("tree", "merged", "per_call"):
        report = audit_session(reader, agent.id, builder=builder, bodies=True)
        assert report.violations == ()
        assert report.clean
        assert report.conservation.captured == 14
        assert report.calls == {CallStatus.COMPLETE: 9}


def test_every_dropped_span_is_found(reader, agent, change):
    for row in reader.recorded_of([agent.id])[1][agent.id]:
        kept = columns(reader, spans, this(row.span.call_id, row.choice))[0]
        change(spans.delete().where(this(row.span.call_id, row.choice)))
        assert rules(reader, agent), row.span.id
        change(insert(spans).values(**kept))
    assert rules(reader, agent) == set()


def test_no_call_is_dropped_from_under_its_spans(reader, agent, change):
    for call in reader.calls(agent.id):
        with pytest.raises(IntegrityError):
            change(calls.delete().where(calls.c.id == call.id))


def test_a_call_dropped_with_its_spans_is_found_by_what_hangs_on_them(reader, agent, change):
    first = reader.calls(agent.id)[0]
    for table in (spans, bodies, call_messages):
        change(table.delete().where(table.c.call_id == first.id))
    change(calls.delete().where(calls.c.id == first.id))
    assert "tree_broken" in rules(reader, agent)


def test_a_duplicated_call_is_found(reader, agent, change):
    original = reader.calls(agent.id)[0].id
    (copy,) = columns(reader, calls, calls.c.id == original)
    change(insert(calls).values(**copy | {"id": "call_copy"}))
    assert "sampled_differs" in rules(reader, agent)
    for copy in columns(reader, spans, spans.c.call_id == original):
        change(insert(spans).values(**copy | {"call_id": "call_copy"}))
    assert "checksum_differs" in rules(reader, agent)


def test_any_two_swapped_logprobs_are_found(reader, agent, change):
    for row in columns(reader, spans, (spans.c.length > 1) & (spans.c.choice != OBSERVED)):
        logprobs = unpack_logprobs(row["logprobs"]).copy()
        logprobs[[0, 1]] = logprobs[[1, 0]]
        swapped = update(spans).where(this(row["call_id"], row["choice"]))
        change(swapped.values(logprobs=pack_logprobs(logprobs)))
        assert rules(reader, agent) == {"checksum_differs"}
        change(swapped.values(logprobs=row["logprobs"]))


def test_a_changed_token_is_found(reader, agent, change):
    row = columns(reader, spans, spans.c.choice == OBSERVED)[0]
    ids = unpack_ids(row["token_ids"]).copy()
    ids[0] += 1
    change(update(spans).where(this(row["call_id"], row["choice"])).values(token_ids=pack_ids(ids)))
    assert "checksum_differs" in rules(reader, agent)


@pytest.mark.parametrize(("column", "codec"), [("token_ids", HALVES), ("logprobs", EXPONENTS)])
def test_a_span_that_cannot_be_read_is_found_and_named(reader, record, change, column, codec):
    session = record()
    call_id = session.call([1, 2], [50, 51])
    damaged = bytes((codec,)) + b"not a frame"
    change(update(spans).where(this(call_id, 0)).values({column: damaged}))
    (report,) = audit(reader)
    assert not report.clean
    told = {violation.rule: violation.detail for violation in report.violations}
    assert f"{call_id}.s0" in told["span_damaged"]
    with pytest.raises(BrokenTree, match="damaged"):
        episode_of(LoadedSession.load(reader, session.id))


def test_a_call_that_ends_while_its_session_is_audited_is_no_violation(reader, record):
    session = record()
    session.call([1], [50])

    def goes_on(_connection, _cursor, statement, *_):
        if "FROM calls" in statement and session.clock == 1.0:
            session.call([1, 50, 2], [51])

    event.listen(reader.engine, "after_cursor_execute", goes_on)
    assert audit_session(reader, session.id).violations == ()
    assert len(reader.calls(session.id)) == 2


@pytest.mark.parametrize(
    ("column", "value", "rule"),
    [
        ("sampled_tokens", 1, "sampled_differs"),
        ("prompt_tokens", 3, "span_misplaced"),
        ("prompt_span_id", "nothing", "tree_broken"),
        ("usage", {"prompt_tokens": 4, "completion_tokens": 3}, "usage_differs"),
        ("usage", {}, "usage_differs"),
    ],
)
def test_a_call_that_contradicts_its_spans_is_found(reader, agent, change, column, value, rule):
    first = reader.calls(agent.id)[0]
    change(update(calls).where(calls.c.id == first.id).values({column: value}))
    assert rule in rules(reader, agent)


@pytest.mark.parametrize("column", ["start", "length", "choice"])
def test_a_span_that_was_moved_is_found(reader, agent, change, column):
    row = columns(reader, spans, spans.c.choice != OBSERVED)[0]
    value = row[column] + 1
    change(update(spans).where(this(row["call_id"], row["choice"])).values({column: value}))
    assert rules(reader, agent)


def test_a_damaged_body_is_found_when_asked_for(reader, agent, change):
    call = reader.calls(agent.id)[0]
    change(update(bodies).where(bodies.c.call_id == call.id).values(data=b"\0other"))
    assert rules(reader, agent) == set()
    report = audit_session(reader, agent.id, bodies=True)
    assert "body_damaged" in {violation.rule for violation in report.violations}


def test_a_policy_that_grew_older_along_a_branch_is_found(reader, record):
    session = record()
    first = session.call([1], [5], version=4)
    session.call([1, 5, 6], [7], parent=first, version=3)
    assert rules(reader, session) == {"version_went_back"}


def test_two_versions_in_one_reply_are_in_order(reader, record):
    session = record()
    session.call([1], [5, 6])
    loaded = LoadedSession.load(reader, session.id)
    (row,) = loaded.tree.sampled()
    structs.force_setattr(row.span, "versions", (VersionRun(0, 1), VersionRun(1, 2)))
    built = build(loaded, DEFAULT_RULES)
    assert built.samples[0].versions.tolist() == [-1, 1, 2]
    assert checked(loaded, built.samples) == set()


# -- samples -------------------------------------------------------------------------------------


def checked(session, samples):
    found = Findings(session.id)
    check_samples(session, DEFAULT_RULES, samples, found)
    return {violation.rule for violation in found.violations}


@pytest.fixture
def built(reader, agent):
    loaded = LoadedSession.load(reader, agent.id)
    return loaded, list(build(loaded, DEFAULT_RULES).samples)


def test_samples_as_built_are_clean(built):
    assert checked(*built) == set()


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("by", [1, -1])
def test_a_mask_shifted_by_one_is_found(built, number, by):
    loaded, samples = built
    shifted = np.roll(samples[number].mask, by)
    samples[number] = replace(samples[number], mask=shifted)
    assert checked(loaded, samples)


@pytest.mark.parametrize("number", range(5))
def test_a_missing_sample_is_found(built, number):
    loaded, samples = built
    del samples[number]
    assert "not_delivered" in checked(loaded, samples)


@pytest.mark.parametrize("number", range(5))
def test_a_doubled_sample_is_found(built, number):
    loaded, samples = built
    assert "trained_twice" in checked(loaded, [*samples, samples[number]])


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("name", ["token_ids", "logprobs", "versions"])
def test_any_changed_sampled_value_is_found(built, number, name):
    loaded, samples = built
    for at in np.flatnonzero(samples[number].calls >= 0):
        values = getattr(samples[number], name).copy()
        values[at] += 1
        changed = [*samples]
        changed[number] = replace(samples[number], **{name: values})
        assert "sample_differs" in checked(loaded, changed)


@pytest.mark.parametrize("number", range(5))
def test_a_changed_context_token_is_found(built, number):
    loaded, samples = built
    for at in np.flatnonzero(samples[number].calls < 0):
        ids = samples[number].token_ids.copy()
        ids[at] += 1
        changed = [*samples]
        changed[number] = replace(samples[number], token_ids=ids)
        assert "sample_differs" in checked(loaded, changed)


def test_training_an_observed_token_is_found(built):
    loaded, samples = built
    mask = samples[0].mask.copy()
    mask[0] = True
    samples[0] = replace(samples[0], mask=mask)
    assert "mask_on_observed" in checked(loaded, samples)


def test_weights_that_do_not_add_up_are_found(built):
    loaded, samples = built
    samples[0] = replace(samples[0], weight=samples[0].weight / 2)
    assert "weights_differ" in checked(loaded, samples)


def test_all_sessions_are_audited_one_by_one(reader, record):
    for _ in range(3):
        record().call([1], [2])
    reports = list(audit(reader))
    assert len(reports) == 3
    assert all(report.clean for report in reports)
