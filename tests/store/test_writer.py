import asyncio
import math
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from bridle.store.errors import NotFound, RecordRejected, StoreBusy, StoreClosed, StoreUnavailable
from bridle.store.records import (
    BreakReason,
    CallKind,
    CallStatus,
    Choice,
    Conversation,
    Message,
    Note,
    PolicyRecord,
    RunRecord,
    SessionRecord,
    TaskRecord,
    VersionRun,
)
from bridle.store.reward import Reward, RewardSource
from bridle.store.tree import TokenTree
from bridle.store.writing.writer import Writer


async def test_a_call_is_read_back_as_it_was_written(writer, reader, calls):
    session = calls.session()
    await writer.add(session)
    begun = calls.begun(
        session,
        headers={"x-session-id": "7"},
        lineage_rule="minted_id",
        conversation=Conversation((Message("user", "hé"),), length=1),
    )
    writer.begin_call(begun)
    ended = calls.ended(
        begun,
        [10, 11, 12],
        [20, 21],
        first_token_at=3.5,
        model_served="policy-7",
        sampling={"temperature": 0.7, "stop": ["a"]},
        kind=CallKind.SUBAGENT,
        role="planner",
        break_reason=BreakReason.REASONING_DROPPED,
        notes=(Note("tool_dropped", "web_search"),),
    )
    await writer.end_call(ended)

    row = reader.call(begun.id)
    assert (row.session_id, row.dialect, row.stream) == (session.id, "chat", True)
    assert (row.status, row.kind, row.role) == (CallStatus.COMPLETE, CallKind.SUBAGENT, "planner")
    assert (row.prompt_tokens, row.sampled_tokens, row.finish_reason) == (3, 2, "stop")
    assert (row.version_start, row.version_end) == (1, 1)
    assert row.break_reason is BreakReason.REASONING_DROPPED
    assert (row.headers, row.sampling) == (begun.headers, ended.sampling)
    assert (row.conversation, row.replies) == (begun.conversation, ended.replies)
    assert row.notes == ended.notes
    assert (row.started_at, row.first_token_at) == (begun.started_at, 3.5)
    assert row.ended_at == ended.ended_at
    assert reader.prompt_token_ids(begun.id).tolist() == [10, 11, 12]
    (choice,) = reader.sampled(begun.id)
    assert choice.token_ids.tolist() == [20, 21]
    assert choice.logprobs.tobytes() == ended.choices[0].logprobs.tobytes()
    assert choice.versions == (VersionRun(0, 1),)
    assert reader.request_body(row.id) == begun.request_body
    assert reader.response_body(row.id) == ended.response_body


async def test_a_turn_stores_only_its_own_tokens(writer, reader, calls):
    session = calls.session()
    await writer.add(session)
    tree, prompt, parent = TokenTree(session.id), list(range(100)), None
    for turn in range(5):
        begun = calls.begun(session, parent_call_id=parent)
        writer.begin_call(begun)
        await writer.end_call(calls.ended(begun, prompt, [200 + turn, 7], tree=tree))
        assert reader.prompt_token_ids(begun.id).tolist() == prompt
        prompt, parent = [*prompt, 200 + turn, 7, 1, 2, 3], begun.id
    assert sum(len(span.token_ids) for span in reader.spans(session.id)) == 100 + 5 * 2 + 4 * 3


async def test_calls_that_begin_and_end_in_one_transaction_are_whole(url, calls, held):
    with Writer(url) as writer:
        session = calls.session()
        await writer.add(session)
        begun = [calls.begun(session) for _ in range(50)]
        with held():
            for call in begun:
                writer.begin_call(call)
            ends = [
                asyncio.ensure_future(writer.end_call(calls.ended(c, [1, 2], [3]))) for c in begun
            ]
            await asyncio.sleep(0)
        await asyncio.gather(*ends)
        assert writer.stats.rejected == 0


async def test_what_is_queued_together_is_one_transaction(writer, reader, calls, held):
    session = calls.session()
    await writer.add(session)
    before = writer.stats.transactions
    begun = [calls.begun(session) for _ in range(200)]
    with held():
        for call in begun:
            writer.begin_call(call)
        ends = [asyncio.ensure_future(writer.end_call(calls.ended(c, [1], [2]))) for c in begun]
        await asyncio.sleep(0)
    await asyncio.gather(*ends)
    # One was under way when the others were queued; they are all in the next.
    assert writer.stats.transactions - before <= 2
    assert len(reader.calls(session.id)) == 200


async def test_the_end_is_acknowledged_after_the_commit(writer, reader, calls):
    session = calls.session()
    await writer.add(session)
    for _ in range(20):
        begun = calls.begun(session)
        writer.begin_call(begun)
        await writer.end_call(calls.ended(begun, [1], [2]))
        assert reader.call(begun.id).status is CallStatus.COMPLETE


async def test_waiters_of_one_loop_are_woken_together(writer, calls, monkeypatch, held):
    session = calls.session()
    await writer.add(session)
    loop, wakes = asyncio.get_running_loop(), []
    real = loop.call_soon_threadsafe
    monkeypatch.setattr(
        loop, "call_soon_threadsafe", lambda *a, **k: (wakes.append(1), real(*a, **k))[1]
    )
    begun = [calls.begun(session) for _ in range(100)]
    with held():
        for call in begun:
            writer.begin_call(call)
        ends = [asyncio.ensure_future(writer.end_call(calls.ended(c, [1], [2]))) for c in begun]
        await asyncio.sleep(0)
    await asyncio.gather(*ends)
    assert len(wakes) <= 2


async def test_a_poisonous_record_fails_alone(writer, reader, calls, held):
    session = calls.session()
    await writer.add(session)
    good = [calls.begun(session) for _ in range(20)]
    bad = calls.begun("session_nobody_made")
    with held():
        for call in [*good[:10], bad, *good[10:]]:
            writer.begin_call(call)
        ends = [
            asyncio.ensure_future(writer.end_call(calls.ended(c, [1, 2], [3])))
            for c in [*good, bad]
        ]
        await asyncio.sleep(0)
    results = await asyncio.gather(*ends, return_exceptions=True)
    assert results[:-1] == [None] * 20
    assert isinstance(results[-1], RecordRejected)
    assert {call.id for call in reader.calls(session.id)} == {call.id for call in good}
    assert all(reader.prompt_token_ids(call.id).tolist() == [1, 2] for call in good)
    with pytest.raises(NotFound):
        reader.call(bad.id)


async def test_a_record_that_has_no_json_form_fails_alone(writer, calls, held):
    session = calls.session()
    await writer.add(session)
    first, second = calls.begun(session), calls.begun(session)
    with held():
        writer.begin_call(first)
        writer.begin_call(second)
        bad = asyncio.ensure_future(
            writer.end_call(calls.ended(first, [1], [2], sampling={"socket": object()}))
        )
        good = asyncio.ensure_future(writer.end_call(calls.ended(second, [1], [2])))
        await asyncio.sleep(0)
    with pytest.raises(RecordRejected, match="not JSON serializable"):
        await bad
    await good


async def test_a_rejected_end_may_be_sent_again_without_its_fault(writer, reader, calls):
    session = calls.session()
    await writer.add(session)
    begun = calls.begun(session)
    writer.begin_call(begun)
    ended = calls.ended(begun, [1, 2], [3, 4])
    with pytest.raises(RecordRejected):
        await writer.end_call(replace(ended, error={"x": object()}))
    await writer.end_call(ended)
    assert reader.prompt_token_ids(begun.id).tolist() == [1, 2]
    assert len(reader.spans(session.id)) == 2


async def test_an_end_without_a_beginning_is_rejected(writer, calls):
    session = calls.session()
    await writer.add(session)
    with pytest.raises(RecordRejected, match="never begun"):
        await writer.end_call(calls.ended(calls.begun(session), [1], [2]))


async def test_a_call_ends_once(writer, reader, calls):
    session = calls.session()
    await writer.add(session)
    begun = calls.begun(session)
    writer.begin_call(begun)
    await writer.end_call(calls.ended(begun, [1], [2]))
    with pytest.raises(RecordRejected):
        await writer.end_call(calls.ended(begun, [1], [9]))
    assert reader.sampled(begun.id)[0].token_ids.tolist() == [2]


async def test_names_and_keys_belong_to_one_session(writer, calls):
    await writer.add(calls.session(name="mine", key_hash="k"))
    with pytest.raises(RecordRejected):
        await writer.add(calls.session(name="mine"))
    with pytest.raises(RecordRejected):
        await writer.add(calls.session(key_hash="k"))


async def test_every_choice_has_its_own_span(writer, reader, calls):
    session = calls.session()
    await writer.add(session)
    begun = calls.begun(session)
    writer.begin_call(begun)
    await writer.end_call(calls.ended(begun, [1, 2], [3, 4], [3, 5, 6], []))
    sampled = [choice.token_ids.tolist() for choice in reader.sampled(begun.id)]
    assert sampled == [[3, 4], [3, 5, 6], []]
    assert reader.call(begun.id).sampled_tokens == 5


async def test_a_call_that_contradicts_itself_is_kept_and_quarantined(writer, reader, calls):
    session = calls.session()
    await writer.add(session)
    begun = calls.begun(session)
    writer.begin_call(begun)
    short = Choice(
        np.array([3, 4], np.uint32), np.zeros(1, np.float32), (VersionRun(0, 1),), "stop"
    )
    await writer.end_call(replace(calls.ended(begun, [1, 2], [3, 4]), choices=(short,)))
    row = reader.call(begun.id)
    assert row.status is CallStatus.QUARANTINED
    assert row.reason.startswith("logprobs_mismatch: 2 ids, 1 logprobs")
    assert reader.sampled(begun.id)[0].token_ids.tolist() == [3, 4]


async def test_an_upstream_without_ids_is_noted(writer, reader, calls):
    session = calls.session()
    await writer.add(session)
    begun = calls.begun(session)
    writer.begin_call(begun)
    bare = replace(calls.ended(begun, [1], [2]), prompt_token_ids=None, choices=())
    await writer.end_call(bare)
    row = reader.call(begun.id)
    assert (row.status, row.prompt_tokens) == (CallStatus.COMPLETE, None)
    assert [note.name for note in row.notes] == ["no_token_ids"]
    assert reader.prompt_token_ids(begun.id) is None


async def test_failed_calls_are_kept_with_their_reason(writer, reader, calls):
    session = calls.session()
    await writer.add(session)
    begun = calls.begun(session)
    writer.begin_call(begun)
    await writer.end_call(
        replace(
            calls.ended(begun, [1], [2]),
            status=CallStatus.FAILED,
            prompt_token_ids=None,
            choices=(),
            reason="refused",
            error={"kind": "overloaded"},
            response_body=b"",
        )
    )
    row = reader.call(begun.id)
    assert (row.status, row.reason) == (CallStatus.FAILED, "refused")
    assert (row.error, row.response_sha256) == ({"kind": "overloaded"}, None)


async def test_a_full_queue_turns_new_calls_away_and_lets_ends_in(url, calls, held):
    with Writer(url, queue_limit=5) as writer:
        session = calls.session()
        await writer.add(session)
        first = calls.begun(session)
        with held():
            writer.begin_call(first)
            while writer.waiting:  # noqa: ASYNC110 - the writer's thread has no event to wait for
                await asyncio.sleep(0.01)
            for _ in range(5):
                writer.begin_call(calls.begun(session))
            with pytest.raises(StoreBusy):
                writer.begin_call(calls.begun(session))
            with pytest.raises(StoreBusy):
                await writer.add(calls.session())
            end = asyncio.ensure_future(writer.end_call(calls.ended(first, [1], [2])))
            await asyncio.sleep(0)
            assert writer.waiting == 6
        await end


async def test_a_wait_that_is_given_up_does_not_take_the_record_back(writer, reader, calls, held):
    session = calls.session()
    await writer.add(session)
    begun = calls.begun(session)
    with held():
        writer.begin_call(begun)
        end = asyncio.ensure_future(writer.end_call(calls.ended(begun, [1], [2])))
        await asyncio.sleep(0)
        end.cancel()
    writer.update_session_sync(session.id, outcome="completed")
    assert reader.call(begun.id).status is CallStatus.COMPLETE


def test_what_is_queued_between_a_beat_and_the_close_is_written(url, reader, calls):
    writer, session = Writer(url).start(), calls.session()
    creating = threading.Thread(target=writer.add_sync, args=[session], daemon=True)
    closing = threading.Thread(target=writer.close, daemon=True)
    take, over = writer._queue.take, threading.Event()

    def nothing_until_the_beat(_):
        writer._queue.take = take
        creating.start()
        while not len(writer._queue):
            time.sleep(0.001)
        closing.start()
        while writer._queue.is_open:
            time.sleep(0.001)
        over.set()
        return []

    writer._queue.take = nothing_until_the_beat
    writer.add_sync(calls.session())  # ends the take that was under way
    assert over.wait(10)
    for thread in (creating, closing):
        thread.join(10)
    assert reader.session(session.id) == session


async def test_closing_writes_what_is_queued(url, reader, calls):
    writer = Writer(url).start()
    session = calls.session()
    writer.add_sync(session)
    begun = calls.begun(session)
    writer.begin_call(begun)
    end = asyncio.ensure_future(writer.end_call(calls.ended(begun, [1], [2])))
    await asyncio.sleep(0)
    await asyncio.to_thread(writer.close)
    await end
    assert reader.call(begun.id).status is CallStatus.COMPLETE
    with pytest.raises(StoreClosed):
        writer.begin_call(calls.begun(session))
    writer.close()


def test_a_loop_that_closed_does_not_stop_the_writer(writer, reader, calls, held):
    session = calls.session()
    writer.add_sync(session)
    begun = calls.begun(session)

    async def walk_away():
        writer.begin_call(begun)
        asyncio.ensure_future(writer.end_call(calls.ended(begun, [1], [2])))  # noqa: RUF006
        await asyncio.sleep(0)

    with held():
        asyncio.run(walk_away())
    writer.update_session_sync(session.id, outcome="completed")
    assert reader.call(begun.id).status is CallStatus.COMPLETE


def test_threads_without_a_loop_wait_for_the_commit(writer, reader, calls):
    session = calls.session()
    writer.add_sync(session)

    def work():
        begun = calls.begun(session)
        writer.begin_call(begun)
        writer.end_call_sync(calls.ended(begun, [1], [2]))
        assert reader.call(begun.id).status is CallStatus.COMPLETE

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reader.call_counts(session.id) == {CallStatus.COMPLETE: 8}


def test_more_sessions_are_asked_for_than_one_query_may_name(reader):
    unknown = [f"ses_{number}" for number in range(70_000)]
    assert reader.call_counts_of(unknown) == {session_id: {} for session_id in unknown}


async def test_a_sessions_tokens_are_counted_once_each(writer, reader, calls):
    busy, idle = calls.session(), calls.session()
    for session in (busy, idle):
        await writer.add(session)
    tree = TokenTree(busy.id)
    for prompt, sampled in (([1, 2, 3], [4, 5]), ([1, 2, 3, 4, 5, 6], [7])):
        begun = calls.begun(busy)
        writer.begin_call(begun)
        await writer.end_call(calls.ended(begun, prompt, sampled, tree=tree))
    assert reader.token_counts_of([busy.id, idle.id]) == {busy.id: (4, 3), idle.id: (0, 0)}
    spans = reader.spans(busy.id)
    assert sum(len(span.token_ids) for span in spans) == 7


async def test_sessions_are_updated_by_column(writer, reader, calls):
    session = calls.session(labels={"a": 1})
    await writer.add(session)
    writer.update_session_sync(session.id, sealed_at=5.0, outcome="timeout", labels={"b": [2]})
    changed = replace(session, sealed_at=5.0, outcome="timeout", labels={"b": [2]})
    assert reader.session(session.id) == changed
    with pytest.raises(TypeError, match="no colour"):
        writer.update_session_sync(session.id, colour="red")
    with pytest.raises(RecordRejected):
        writer.update_session_sync("session_none", outcome="completed")


async def test_a_kind_may_be_set_by_hand(writer, reader, calls):
    session = calls.session()
    await writer.add(session)
    begun = calls.begun(session)
    writer.begin_call(begun)
    await writer.end_call(calls.ended(begun, [1], [2]))
    await writer.set_kind(begun.id, CallKind.SIDE, "title", by="me")
    call = reader.call(begun.id)
    assert (call.kind_set, call.role_set, call.kind_by) == (CallKind.SIDE, "title", "me")
    assert call.kind is CallKind.UNKNOWN
    await writer.set_kind(begun.id, None, by="me")
    assert reader.call(begun.id).kind_set is None
    with pytest.raises(RecordRejected):
        await writer.set_kind("call_none", CallKind.MAIN, by="me")


async def test_a_kind_set_by_hand_outlives_the_end_of_the_call(writer, reader, calls):
    session = calls.session()
    await writer.add(session)
    begun = calls.begun(session)
    writer.begin_call(begun)
    await writer.set_kind(begun.id, CallKind.SIDE, by="me")
    await writer.end_call(calls.ended(begun, [1], [2]))
    assert reader.call(begun.id).kind_set is CallKind.SIDE


async def test_rewards_keep_float64_and_come_late(writer, reader, calls):
    session = calls.session()
    await writer.add(session)
    writer.update_session_sync(session.id, sealed_at=1.0)
    first = Reward(
        session.id, "reward", 0.1 + 0.2, 10.0, source=RewardSource.VERIFIER, detail={"why": "x"}
    )
    second = Reward(session.id, "reward", -1e-300, 11.0, call_id="call_x", turn=3)
    await writer.add(second)
    await writer.add(first)
    assert reader.rewards(session.id) == [first, second]
    assert reader.reward_names() == ["reward"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
async def test_a_reward_is_a_number(writer, calls, value):
    session = calls.session()
    await writer.add(session)
    with pytest.raises(ValueError, match="finite"):
        await writer.add(Reward(session.id, "reward", value, 1.0))


def test_runs_tasks_policies_and_metrics(writer, reader):
    run = RunRecord("run_1", "train", 1.0, name="first", config={"lr": 1e-5})
    writer.add_sync(run)
    writer.finish_run("run_1", "completed", ended_at=9.0)
    assert reader.run("run_1") == replace(run, status="completed", ended_at=9.0)
    assert reader.runs("train") == [reader.run("run_1")]
    assert reader.runs("demo") == []

    tasks = [TaskRecord(f"t{i}", "shop", "train" if i else "eval", {"q": i}, 2.0) for i in range(3)]
    writer.add_sync(*tasks)
    renewed = replace(tasks[1], payload={"q": "new"})
    writer.add_sync(tasks[1], renewed)
    for task in (tasks[0], renewed, tasks[2]):
        named = {"task_suite": task.suite, "task_split": task.split, "task_id": task.id}
        assert reader.task_of(SessionRecord("session", 1.0, **named)) == task

    policy = PolicyRecord("run_1", 2**40, 3.0, path="/ckpt", digest="d")
    writer.add_sync(policy)
    verified = replace(policy, verified=True, logprob_gap=1e-5)
    writer.add_sync(verified)
    assert reader.policies("run_1") == [verified]
    worker = [PolicyRecord("run_1", version, 3.0, name="worker") for version in (0, 2**40)]
    planner = PolicyRecord("run_1", 2**40, 3.0, name="planner")
    writer.add_sync(*worker, planner)
    assert reader.policies("run_1") == [planner, verified, *worker]

    writer.record_metrics("run_1", 1, {"loss": 0.5, "gap": math.nan}, at=4.0)
    writer.record_metrics("run_1", 1, {"loss": 0.25}, at=5.0)
    gap, loss = reader.metrics("run_1")
    assert (loss.value, loss.at) == (0.25, 5.0)
    assert math.isnan(gap.value)
    writer.record_metrics("run_1", 2, {})


def test_a_run_that_nobody_began_cannot_finish(writer):
    with pytest.raises(RecordRejected):
        writer.finish_run("run_none", "completed")


async def test_the_cache_may_forget_any_session_at_any_time(url, reader, calls):
    with Writer(url, cache_bytes=1) as writer:
        session = calls.session()
        await writer.add(session)
        tree, prompt, parent = TokenTree(session.id), list(range(50)), None
        for turn in range(6):
            body = b'{"messages":[' + b'"some words to say",' * (20 * (turn + 1)) + b"]}"
            begun = calls.begun(session, parent_call_id=parent, request_body=body)
            writer.begin_call(begun)
            await writer.end_call(calls.ended(begun, prompt, [60 + turn], tree=tree))
            assert reader.request_body(begun.id) == body
            prompt, parent = [*prompt, 60 + turn, 9], begun.id
    assert sum(len(span.token_ids) for span in reader.spans(session.id)) == 50 + 6 + 5


def test_store_errors_are_all_unavailability():
    for error in (StoreBusy, StoreClosed, RecordRejected):
        assert issubclass(error, StoreUnavailable)
