"""Samples that are kept in the store, and kinds that people set."""

from dataclasses import fields

import numpy as np
import pytest

from bridle.reconstruct.audit import audit_session
from bridle.reconstruct.kinds.kinds import classify, with_kinds
from bridle.reconstruct.samples.builders import BUILDERS, build
from bridle.reconstruct.samples.rules import SampleRules, parse_failed
from bridle.reconstruct.samples.sample_store import derive, derive_again, stored_samples
from bridle.reconstruct.session import LoadedSession
from bridle.reconstruct.tree import BrokenTree
from bridle.store.records import CallKind
from bridle.store.schema.tables import spans


def same(left, right):
    """Whether two samples are equal to the bit."""
    return all(np.array_equal(getattr(left, f.name), getattr(right, f.name)) for f in fields(left))


@pytest.mark.parametrize("builder", BUILDERS)
def test_kept_samples_are_those_that_were_made_and_so_is_their_policy(reader, agent, builder):
    policy = SampleRules(finish_length=False, oldest_version=2)
    made = derive(LoadedSession.load(reader, agent.id), policy, builder).samples
    found, kept = stored_samples(LoadedSession.load(reader, agent.id), builder)
    assert found == policy
    assert len(kept) == len(made) > 0
    for sample in made:
        assert any(same(sample, other) for other in kept)


def test_a_builder_keeps_one_set_the_latest(reader, agent):
    derive(LoadedSession.load(reader, agent.id))
    strict = SampleRules(kinds=frozenset({CallKind.MAIN}))
    made = derive(LoadedSession.load(reader, agent.id), strict).samples
    derive(LoadedSession.load(reader, agent.id), builder="per_call")
    policy, kept = stored_samples(LoadedSession.load(reader, agent.id))
    assert (policy, len(kept)) == (strict, len(made))


def test_nothing_is_kept_until_it_is_made(reader, agent):
    assert stored_samples(LoadedSession.load(reader, agent.id)) == (None, [])
    assert derive_again(LoadedSession.load(reader, agent.id)) == 0


def test_a_kind_set_by_hand_counts_before_what_was_recorded(reader, writer, agent):
    main = next(call for call in reader.calls(agent.id) if call.kind is CallKind.MAIN)
    before = build(LoadedSession.load(reader, agent.id), SampleRules()).conservation
    writer.set_kind_sync(main.id, CallKind.SIDE, "title", by="ada")
    calls = reader.calls(agent.id)
    verdict = classify(calls)[main.id]
    assert (verdict.kind, verdict.role) == (CallKind.SIDE, "title")
    assert verdict.evidence == "set by ada"
    after = build(LoadedSession.load(reader, agent.id), SampleRules()).conservation
    assert after.trained == before.trained - 2
    assert audit_session(reader, agent.id).clean
    told = {call.id: call for call in with_kinds(calls)}[main.id]
    assert (told.kind, told.role) == (CallKind.SIDE, "title")
    writer.set_kind_sync(main.id, None, by="ada")
    again = build(LoadedSession.load(reader, agent.id), SampleRules()).conservation
    assert again == before


def test_samples_are_made_again_under_the_policy_that_made_them(reader, writer, agent):
    policy = SampleRules(kinds=frozenset({CallKind.MAIN}))
    derive(LoadedSession.load(reader, agent.id), policy)
    _, before = stored_samples(LoadedSession.load(reader, agent.id))
    side = next(call for call in reader.calls(agent.id) if call.kind is CallKind.SIDE)
    writer.set_kind_sync(side.id, CallKind.MAIN, by="ada")
    assert derive_again(LoadedSession.load(reader, agent.id)) == len(before) + 1
    found, after = stored_samples(LoadedSession.load(reader, agent.id))
    assert found == policy
    assert {s.leaf_call_id for s in after} - {s.leaf_call_id for s in before} == {side.id}


@pytest.mark.damages_store
def test_kept_samples_whose_spans_are_gone_are_an_error(reader, agent):
    derive(LoadedSession.load(reader, agent.id))
    leaf = stored_samples(LoadedSession.load(reader, agent.id))[1][-1].leaf_call_id
    with reader.engine.begin() as connection:
        connection.execute(spans.delete().where(spans.c.call_id == leaf))
    with pytest.raises(BrokenTree):
        stored_samples(LoadedSession.load(reader, agent.id))


def calling(arguments):
    function = {"name": "shell", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}


@pytest.mark.parametrize(
    ("message", "failed"),
    [
        (calling('{"command": "ls"}'), False),
        (calling(""), False),
        (calling('{"command": "ls'), True),
        (calling('["ls"]'), True),
        ({"role": "assistant", "content": 'Now <tool_call>\n{"name": "shell", "arg'}, True),
        ({"role": "assistant", "content": "done"}, False),
    ],
)
def test_a_reply_whose_tool_call_nobody_can_read_is_left_out_when_asked(
    reader, record, message, failed
):
    session = record()
    call_id = session.call([1, 2], [3, 4, 5], message=message)
    assert parse_failed(reader.call(call_id)) is failed
    loaded = LoadedSession.load(reader, session.id)
    assert build(loaded, SampleRules()).conservation.trained == 3
    strict = build(loaded, SampleRules(parse_failed=False)).conservation
    assert strict.dropped == ({"parse_failed": 3} if failed else {})
    assert strict.balanced


def test_of_several_choices_only_those_are_left_out_that_failed(reader, record):
    session = record()
    conversation = {"choices": [calling("{")]}
    session.call([1], [2, 3], [4], message=calling("{}"), conversation=conversation)
    loaded = LoadedSession.load(reader, session.id)
    table = build(loaded, SampleRules(parse_failed=False)).conservation
    assert (table.trained, table.dropped) == (2, {"parse_failed": 1})
