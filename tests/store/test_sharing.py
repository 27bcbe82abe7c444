"""Several writers on one store, and one session that moves between them."""

import asyncio
import threading

from bridle.store.call import CallEnded
from bridle.store.reading.queries import Reader
from bridle.store.records import CallStatus
from bridle.store.schema.database import connect, transaction
from bridle.store.tree import TokenTree
from bridle.store.writing import batch
from bridle.store.writing.writer import Writer


async def turn(writer, calls, session, prompt, reply, parent, tree):
    body = b'{"messages":[' + b",".join(b'"%d"' % token for token in prompt) + b"]}"
    begun = calls.begun(session, parent_call_id=parent, request_body=body)
    writer.begin_call(begun)
    await writer.end_call(calls.ended(begun, prompt, reply, tree=tree))
    return begun.id


async def test_two_writers_fill_one_store(url, reader, calls):
    with Writer(url) as first, Writer(url) as second:

        async def work(writer):
            session = calls.session()
            tree = TokenTree(session.id)
            await writer.add(session)
            parent, prompt = None, [1, 2, 3]
            for number in range(15):
                parent = await turn(writer, calls, session, prompt, [number], parent, tree)
                prompt = [*prompt, number, 9]
            return session

        tasks = [work(writer) for writer in (first, second) for _ in range(6)]
        sessions = await asyncio.gather(*tasks)
        assert first.stats.rejected == second.stats.rejected == 0
    for session in sessions:
        assert reader.call_counts(session.id) == {CallStatus.COMPLETE: 15}
        for call in reader.calls(session.id):
            assert len(reader.prompt_token_ids(call.id)) == call.prompt_tokens


async def test_a_writer_packs_before_it_keeps_others_out(url, reader, calls, monkeypatch):
    pack, seen = batch.pack_whole, []

    def while_another_writes(data, texts):
        with transaction(other):
            seen.append(data)
        return pack(data, texts)

    monkeypatch.setattr(batch, "pack_whole", while_another_writes)
    other = connect(url, busy_timeout_s=0.0, writes=True)
    with Writer(url) as writer:
        session = calls.session()
        await writer.add(session)
        await turn(writer, calls, session, [1, 2, 3], [4], None, TokenTree(session.id))
    other.dispose()
    assert seen
    assert reader.call_counts(session.id) == {CallStatus.COMPLETE: 1}


async def test_a_session_that_changes_writers_every_turn_is_still_stored_once(url, reader, calls):
    with Writer(url) as first, Writer(url) as second:
        session = calls.session()
        await first.add(session)
        tree, parent, prompt = TokenTree(session.id), None, list(range(100))
        for number in range(10):
            writer = (first, second)[number % 2]
            parent = await turn(writer, calls, session, prompt, [200 + number, 7], parent, tree)
            prompt = [*prompt, 200 + number, 7, 1]
    stored = sum(len(span.token_ids) for span in reader.spans(session.id))
    assert stored == 100 + 10 * 2 + 9


async def test_a_restarted_writer_goes_on_where_the_session_was(url, reader, calls):
    session, parent, prompt = calls.session(), None, list(range(100))
    tree = TokenTree(session.id)
    for number in range(4):
        with Writer(url) as writer:
            if parent is None:
                await writer.add(session)
            parent = await turn(writer, calls, session, prompt, [200 + number], parent, tree)
        prompt = [*prompt, 200 + number, 1]
    assert sum(len(span.token_ids) for span in reader.spans(session.id)) == 100 + 4 + 3
    bodies = [reader.request_body(call.id) for call in reader.calls(session.id)]
    assert [len(body) for body in bodies] == sorted(len(body) for body in bodies)


def test_two_writers_that_hold_each_others_bodies_do_not_lock_up(url, calls):
    bodies = [b'{"n":"%d"}' % number + b"x" * 300 for number in range(40)]
    errors = []

    def work(order):
        async def go():
            with Writer(url) as writer:
                session = calls.session()
                await writer.add(session)
                for body in order:
                    begun = calls.begun(session, request_body=body)
                    writer.begin_call(begun)
                    await writer.end_call(calls.ended(begun, [1], [2]))

        try:
            asyncio.run(go())
        except Exception as error:  # noqa: BLE001 - shown by the assertion
            errors.append(error)

    threads = [threading.Thread(target=work, args=(o,)) for o in (bodies, bodies[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    with Reader(url) as reader:
        for session in reader.sessions():
            read = [reader.request_body(call.id) for call in reader.calls(session.id)]
            assert sorted(read) == sorted(bodies)


def fail(writer, calls, session):
    """A call that ends as every other that fails: not a byte of it is its own."""
    begun = calls.begun(session, request_body=b'{"messages":["a question"]}')
    writer.begin_call(begun)
    writer.update_session_sync(session.id, outcome=None)  # its end is written alone
    writer.end_call_sync(
        CallEnded(
            id=begun.id,
            session_id=session.id,
            status=CallStatus.FAILED,
            ended_at=1.0,
            sampling={"seed": begun.id},
            response_body=b'{"error":"overloaded"}',
        )
    )
    return begun.id


def test_calls_that_say_the_same_through_two_writers_are_both_kept(url, reader, calls):
    with Writer(url) as first, Writer(url) as second:
        session = calls.session()
        first.add_sync(session)
        made = [fail(writer, calls, session) for writer in (first, second, first, second)]
        assert first.stats.rejected == second.stats.rejected == 0
    for call_id in made:
        row = reader.call(call_id)
        assert (row.status, row.sampling) == (CallStatus.FAILED, {"seed": call_id})
        assert reader.response_body(call_id) == b'{"error":"overloaded"}'
