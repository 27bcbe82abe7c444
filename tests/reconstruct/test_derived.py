"""Kinds that people set, and replies that cannot be parsed."""

import pytest

from bridle.reconstruct.audit import audit_session
from bridle.reconstruct.kinds.kinds import classify, with_kinds
from bridle.reconstruct.samples.builders import build
from bridle.reconstruct.samples.rules import SampleRules, parse_failed
from bridle.reconstruct.session import LoadedSession
from bridle.store.records import CallKind


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
