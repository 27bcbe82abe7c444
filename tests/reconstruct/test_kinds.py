"""Test that the record tells the purpose of a call."""

from __future__ import annotations

import json
import time

import pytest

from bridle.reconstruct.audit import audit_session
from bridle.reconstruct.kinds.kinds import classify
from bridle.reconstruct.samples.builders import build
from bridle.reconstruct.samples.rules import DEFAULT_RULES
from bridle.reconstruct.session import LoadedSession
from bridle.store.records import BreakReason, CallKind, CallStatus

SUMMARY = "We looked at both files, found the first one wrong, and mended it as was asked. " * 2


def asked(*texts, tools=("shell",), system="work", role="user", **lineage):
    """A call's recorded conversation: its tools, and lineage's digests of how it begins."""
    state = {"system": system, "tools": " ".join(tools), **lineage}
    tail = [{"role": role, "content": text} for text in texts]
    return {"tail": tail, "lineage": state, "tools": [{"name": name} for name in tools]}


@pytest.fixture
def recording(record):
    return record()


@pytest.fixture
def call(recording):
    """Records a call of unknown kind; its number is in its tokens."""
    numbers = iter(range(1, 100))

    def record(conversation=None, headers=None, parent=None, **fields):
        number = next(numbers)
        conversation = asked("do it") if conversation is None else conversation
        if "lineage" in conversation and "break_reason" not in fields:
            conversation["lineage"].setdefault("base", parent)
        return recording.call(
            [1000 + number, 1],
            [2000 + number, 2],
            parent=parent,
            headers=headers or {},
            **{"kind": CallKind.UNKNOWN, "conversation": conversation, **fields},
        )

    return record


@pytest.fixture
def kinds(recording, reader):
    """The verdicts of the recorded session, in the order of its calls."""

    def told():
        calls = reader.calls(recording.id)
        verdicts = classify(calls)
        return [verdicts[call.id].kind for call in calls]

    return told


def test_the_only_conversation_of_a_session_is_main(call, kinds):
    first = call()
    call(parent=first)

    assert kinds() == [CallKind.MAIN, CallKind.MAIN]


def test_a_title_asked_once_without_tools_under_other_instructions_is_a_side_call(call, kinds):
    call(asked("give this a title", tools=(), system="titles"))
    first = call()
    call(parent=first)

    assert kinds() == [CallKind.SIDE, CallKind.MAIN, CallKind.MAIN]


def test_a_side_call_is_masked_with_its_reason_and_the_session_stays_clean(call, recording, reader):
    call(asked("give this a title", tools=(), system="titles"))
    first = call()
    call(parent=first)

    built = build(LoadedSession.load(reader, recording.id), DEFAULT_RULES)
    assert dict(built.conservation.dropped) == {"kind_side": 2}
    assert audit_session(reader, recording.id).clean


def test_lone_questions_without_tools_are_not_called_side_calls_of_each_other(call, kinds):
    call(asked("one", tools=()))
    call(asked("two", tools=()))

    assert kinds() == [CallKind.MAIN, CallKind.MAIN]


def test_conversations_that_begin_differently_stay_unknown(call, kinds):
    for system in ("planner", "coder"):
        first = call(asked("do it", system=system))
        call(parent=first)

    assert kinds() == [CallKind.UNKNOWN] * 4


def test_a_lone_call_under_the_same_instructions_as_the_work_stays_unknown(call, kinds):
    call(asked("is this a question?", tools=()))
    first = call()
    call(parent=first)

    assert kinds()[0] is CallKind.UNKNOWN


@pytest.mark.parametrize(
    ("headers", "kind"),
    [
        ({"x-claude-code-agent-id": "a7"}, CallKind.SUBAGENT),
        ({"x-session-id": "s2", "x-parent-session-id": "s1"}, CallKind.SUBAGENT),
        ({"x-codex-turn-metadata": '{"request_kind": "compaction"}'}, CallKind.COMPACTION),
        ({"x-codex-turn-metadata": '{"request_kind": "turn"}'}, CallKind.MAIN),
    ],
)
def test_a_harness_that_names_a_call_is_believed(call, kinds, headers, kind):
    first = call()
    call(parent=first)
    call(parent=first, headers=headers)

    assert kinds() == [CallKind.MAIN, CallKind.MAIN, kind]


def test_a_kind_that_is_recorded_is_kept(call, kinds):
    call(kind=CallKind.COUNT)
    call()

    assert kinds() == [CallKind.COUNT, CallKind.MAIN]


def test_the_call_whose_summary_a_new_conversation_begins_with_is_a_compaction(call, kinds):
    first = call()
    summary = {"role": "assistant", "content": SUMMARY}
    summariser = call(asked("sum up", tools=(), system="summaries"), parent=first, message=summary)
    begun = asked(f"So far:\n{SUMMARY}\nGo on.")
    call(begun, parent=summariser, break_reason=BreakReason.COMPACTED)

    assert kinds() == [CallKind.MAIN, CallKind.COMPACTION, CallKind.MAIN]


def test_a_conversation_that_goes_on_from_a_summariser_of_its_own_is_main(call, kinds):
    first = call()
    call(parent=first)
    summary = {"role": "assistant", "content": SUMMARY}
    summariser = call(asked("sum up", tools=(), system="summaries"), message=summary)
    begun = asked(f"So far:\n{SUMMARY}\nGo on.")
    resumed = call(begun, parent=summariser, break_reason=BreakReason.COMPACTED)
    call(parent=resumed)

    main = CallKind.MAIN
    assert kinds() == [main, main, CallKind.COMPACTION, main, main]


def test_a_summary_that_the_work_goes_on_from_as_if_it_had_said_it_is_a_compaction(call, kinds):
    first = call()
    second = call(parent=first)
    summary = {"role": "assistant", "content": SUMMARY}
    call(asked("sum up", tools=(), system="summaries"), message=summary)
    shortened = asked("What did we do so far?")
    shortened["tail"].append(summary)
    call(shortened, parent=second, break_reason=BreakReason.EDITED)

    main = CallKind.MAIN
    assert kinds() == [main, main, CallKind.COMPACTION, main]


def test_a_summary_asked_for_in_vain_is_a_compaction_like_the_one_that_was_used(call, kinds):
    first = call()
    second = call(parent=first)
    instruction = "Answer with a summary and nothing else."
    for text in ("Well, we did this and that, and after all of it the files were mended.", SUMMARY):
        message = {"role": "assistant", "content": f"<thought>Hm.</thought><sum>\n{text}\n</sum>"}
        call(asked(instruction), parent=second, message=message)
    begun = asked(f"The summary covers what was before:\n{SUMMARY.strip()}\nGo on.")
    call(begun, parent=second, break_reason=BreakReason.COMPACTED)

    main, compaction = CallKind.MAIN, CallKind.COMPACTION
    assert kinds() == [main, main, compaction, compaction, main]


def test_a_conversation_that_forgets_as_it_goes_is_told_in_no_time(call, kinds):
    """Replies with tags that nothing closes, under a history whose beginning is left out."""
    questions = [f"And page {n}? " * 100 for n in range(60)]
    before = None
    for number in range(len(questions)):
        page = f"Page {number}:\n" + "<li>Another thing.\n" * 1000
        before = call(
            asked(*questions[max(0, number - 10) : number + 1]),
            parent=before,
            break_reason=BreakReason.EDITED if before else None,
            message={"role": "assistant", "content": page},
        )

    started = time.process_time()
    assert kinds() == [CallKind.MAIN] * 60
    assert time.process_time() - started < 5


def test_an_answer_quoted_in_a_conversation_that_leaves_nothing_out_is_no_compaction(call, kinds):
    first = call()
    aside = {"role": "assistant", "content": SUMMARY}
    call(asked("what do you think?", tools=(), system="critic"), message=aside)
    call(asked(f"A critic says: {SUMMARY}"), parent=first)

    assert CallKind.COMPACTION not in kinds()


def test_an_answer_pasted_into_another_conversation_is_unknown_rather_than_a_compaction(
    call, kinds
):
    first = call(asked("look at it", system="one"))
    call(parent=first, message={"role": "assistant", "content": SUMMARY})
    other = call(asked(f"Somebody found: {SUMMARY}", system="two"))
    call(parent=other)

    assert kinds() == [CallKind.UNKNOWN] * 4


def test_a_report_that_is_part_of_a_task_handed_on_is_its_sub_agents_work(call, kinds):
    first = call(message=delegating("Find all callers."))
    explorer = call(asked("Find all callers.", tools=(), system="explorer"))
    call(parent=explorer, message={"role": "assistant", "content": SUMMARY})
    task = f"Mend the files. An explorer says: {SUMMARY.strip()}"
    second = call(parent=first, message=delegating(task))
    call(asked(task, system="mender"))
    call(parent=second)

    main, sub = CallKind.MAIN, CallKind.SUBAGENT
    assert kinds() == [main, sub, sub, main, sub, main]


def test_a_compaction_that_echoes_its_parent_leaves_that_parent_main(call, kinds):
    first = call(message={"role": "assistant", "content": SUMMARY})
    tail = asked(SUMMARY, role="assistant")
    call(tail, parent=first, break_reason=BreakReason.COMPACTED)

    assert kinds() == [CallKind.MAIN, CallKind.MAIN]


def test_a_call_that_leaves_the_conversation_under_other_tools_is_a_side_call(call, kinds):
    first = call()
    call(
        asked("as JSON", tools=()),
        parent=first,
        break_reason=BreakReason.TOOLS_CHANGED,
    )
    call(parent=first)

    assert kinds() == [CallKind.MAIN, CallKind.SIDE, CallKind.MAIN]


@pytest.mark.parametrize("status", [CallStatus.PARTIAL, CallStatus.FAILED, CallStatus.INTERRUPTED])
@pytest.mark.parametrize("reason", [BreakReason.SYSTEM_CHANGED, BreakReason.TOOLS_CHANGED])
def test_a_call_that_resumes_after_a_cut_reply_does_the_work(call, kinds, status, reason):
    first = call()
    call(parent=first, status=status)
    call(asked("go on", tools=()), parent=first, break_reason=reason)

    assert kinds()[-1] is CallKind.MAIN


def test_a_cut_reply_that_the_conversation_went_on_from_still_shows_a_digression(call, kinds):
    first = call()
    cut = call(parent=first, status=CallStatus.PARTIAL)
    call(asked("as JSON", tools=()), parent=first, break_reason=BreakReason.TOOLS_CHANGED)
    call(parent=cut)

    assert kinds() == [CallKind.MAIN, CallKind.MAIN, CallKind.SIDE, CallKind.MAIN]


def test_a_call_that_resumes_after_what_followed_a_cut_reply_does_the_work(call, kinds):
    first = call()
    cut = call(parent=first, status=CallStatus.PARTIAL)
    call(parent=cut)
    call(asked("go on", tools=()), parent=first, break_reason=BreakReason.TOOLS_CHANGED)

    assert kinds()[-1] is CallKind.MAIN


def test_a_failed_call_that_was_asked_again_is_a_retry_and_the_one_that_worked_is_not(
    call, kinds, recording
):
    call(status=CallStatus.PARTIAL)
    call(asked("do it"))

    assert kinds() == [CallKind.RETRY, CallKind.MAIN]


def test_a_complete_call_that_was_asked_again_keeps_its_kind(call, kinds):
    call()
    call(asked("do it"))

    assert kinds() == [CallKind.MAIN, CallKind.MAIN]


def delegating(*tasks, name="task"):
    """A reply that hands each task to a sub-agent."""
    functions = [
        {"name": name, "arguments": json.dumps({"prompt": task, "subagent_type": "explore"})}
        for task in tasks
    ]
    calls = [
        {"id": f"call_{n}", "type": "function", "function": function}
        for n, function in enumerate(functions)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def test_conversations_that_open_with_a_tool_calls_argument_are_sub_agents_of_its_caller(
    call, recording, reader
):
    first = call(message=delegating("Find all callers.", "Find all their tests."))
    for task in ("Find all callers.", "Find all their tests."):
        begun = call(asked("Today is Monday.", task, system="explorer"))
        call(parent=begun)
    call(parent=first)

    verdicts = [classify(reader.calls(recording.id))[c.id] for c in reader.calls(recording.id)]
    assert [verdict.kind for verdict in verdicts] == [
        CallKind.MAIN,
        *[CallKind.SUBAGENT] * 4,
        CallKind.MAIN,
    ]
    assert {verdict.role for verdict in verdicts} == {None, "explore"}
    assert verdicts[1].evidence == f"its task is an argument of a tool call of {first}"


def test_a_task_that_nobody_handed_on_makes_no_sub_agent(call, kinds):
    first = call(message=delegating("Find all callers."))
    call(parent=first)
    lone = call(asked("Find all callers, please.", system="explorer"))
    call(parent=lone)

    assert CallKind.SUBAGENT not in kinds()


def test_arguments_that_are_no_json_are_passed_over(call, kinds):
    broken = delegating("Find all callers.")
    broken["tool_calls"][0]["function"]["arguments"] = '{"prompt": "Find'
    first = call(message=broken)
    call(parent=first)

    assert kinds() == [CallKind.MAIN, CallKind.MAIN]
