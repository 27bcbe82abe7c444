"""Processes that die, and processes that do not."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from sqlalchemy import insert, update

from bridle.store import processes
from bridle.store.reading.queries import Reader
from bridle.store.records import CallStatus
from bridle.store.schema.database import connect, migrate, transaction
from bridle.store.schema.tables import writers
from bridle.store.writing.writer import Writer

pytestmark = pytest.mark.loop

CHILD = textwrap.dedent(
    """
    import asyncio, sys, time
    import numpy as np
    from bridle.store.call import *
    from bridle.store.records import *
    from bridle.store.writing.writer import Writer

    async def record(writer, session, number):
        parent, prompt = None, np.arange(20, dtype=np.uint32)
        while True:
            call = new_id("call")
            body = b'{"turn":"%s"}' % (b"%d " % number * len(prompt))
            begun = CallBegun(
                id=call, session_id=session, dialect="chat", started_at=time.time(),
                request_body=body, stream=True, model_requested="m", parent_call_id=parent)
            writer.begin_call(begun)
            await asyncio.sleep(0)
            ids = np.array([number, 7, len(prompt)], dtype=np.uint32)
            choice = Choice(ids, np.zeros(3, np.float32), (VersionRun(0, 1),), "stop")
            usage = {"prompt_tokens": len(prompt), "completion_tokens": 3}
            await writer.end_call(CallEnded(
                id=call, session_id=session, status=CallStatus.COMPLETE,
                ended_at=time.time(), prompt_token_ids=prompt,
                choices=(choice,), response_body=call.encode(), usage=usage,
            ))
            print(call, len(prompt), flush=True)
            prompt, parent = np.concatenate([prompt, ids, ids]), call

    async def main():
        writer = Writer(sys.argv[1]).start()
        sessions = [new_id("session") for _ in range(8)]
        for session in sessions:
            await writer.add(SessionRecord(session, time.time()))
        await asyncio.gather(*(record(writer, s, n) for n, s in enumerate(sessions)))

    asyncio.run(main())
    """
)


def child(url, program=CHILD):
    return subprocess.Popen(
        [sys.executable, "-c", program, url], stdout=subprocess.PIPE, text=True, cwd=os.getcwd()
    )


@pytest.mark.parametrize("attempt", range(3))
@pytest.mark.sampled(2)
def test_kill_9_loses_no_acknowledged_call_and_leaves_none_half_written(url, attempt):
    process = child(url)
    acknowledged = [process.stdout.readline() for _ in range(20)]
    time.sleep(random.Random(attempt).random() * 0.3)
    process.send_signal(signal.SIGKILL)
    rest, _ = process.communicate()
    lines = [line.split() for line in acknowledged + rest.splitlines()]
    said = {line[0]: int(line[1]) for line in lines if len(line) == 2}

    with Writer(url) as writer, Reader(url) as reader:
        assert writer.stats.interrupted == len(
            [
                call
                for session in reader.sessions()
                for call in reader.calls(session.id)
                if call.status is CallStatus.INTERRUPTED
            ]
        )
        found = {}
        for session in reader.sessions():
            spans = {span.call_id for span in reader.spans(session.id)}
            for call in reader.calls(session.id)[-25:]:
                assert call.status in (CallStatus.COMPLETE, CallStatus.INTERRUPTED)
                reader.request_body(call.id)
                if call.status is CallStatus.COMPLETE:
                    found[call.id] = len(reader.prompt_token_ids(call.id))
                    assert len(reader.sampled(call.id)[0].token_ids) == 3
                    assert reader.response_body(call.id) == call.id.encode()
                else:
                    assert call.reason == "the process that ran it died"
                    assert call.id not in spans
        everything = {
            call.id: call.prompt_tokens
            for session in reader.sessions()
            for call in reader.calls(session.id)
            if call.status is CallStatus.COMPLETE
        }
    assert found.items() <= everything.items()
    assert said.items() <= everything.items()


async def open_call(writer, calls):
    session = calls.session()
    await writer.add(session)
    begun = calls.begun(session)
    writer.begin_call(begun)
    writer.update_session_sync(session.id, outcome=None)
    return begun


async def test_the_calls_of_a_living_process_are_left_alone(url, reader, calls):
    with Writer(url) as first:
        begun = await open_call(first, calls)
        with Writer(url) as second:
            assert second.stats.interrupted == 0
            assert second.mark_interrupted() == 0
        assert reader.call(begun.id).status is CallStatus.OPEN
        await first.end_call(calls.ended(begun, [1], [2]))
    assert reader.call(begun.id).status is CallStatus.COMPLETE


async def test_calls_left_open_by_a_writer_that_closes_are_interrupted(url, reader, calls):
    with Writer(url) as writer:
        begun = await open_call(writer, calls)
    assert reader.call(begun.id).status is CallStatus.INTERRUPTED


async def test_a_lease_that_ran_out_on_another_host_interrupts(url, reader, calls):
    with Writer(url) as writer:
        begun = await open_call(writer, calls)
        engine = connect(url)
        with transaction(engine) as connection:
            connection.execute(
                update(writers).values(host="elsewhere", seen_at=time.time() - 31, lease=30)
            )
        with Writer(url) as second:
            assert second.stats.interrupted == 1
        assert reader.call(begun.id).status is CallStatus.INTERRUPTED
        # Judged too early: the process was only slow, and its call ends after all.
        await writer.end_call(calls.ended(begun, [1], [2]))
        assert reader.call(begun.id).status is CallStatus.COMPLETE
        engine.dispose()


async def test_a_process_on_another_host_is_trusted_until_its_lease_ends(url, calls):
    engine = connect(url)
    with transaction(engine) as connection:
        connection.execute(
            insert(writers).values(
                id="w", host="elsewhere", pid=1, process="x", started_at=0, lease=30, batch=0,
                seen_at=time.time() - 20,
            )
        )  # fmt: skip
    with Writer(url):
        pass
    with engine.connect() as connection:
        assert [row.id for row in connection.execute(writers.select())] == ["w"]
    engine.dispose()


async def test_an_idle_writer_keeps_its_lease(url, reader, calls):
    with Writer(url, lease=1.5) as writer:
        begun = await open_call(writer, calls)
        await asyncio.sleep(2.0)
        engine = connect(url)
        with transaction(engine) as connection:
            connection.execute(update(writers).values(host="elsewhere"))
        with Writer(url) as second:
            assert second.stats.interrupted == 0
        engine.dispose()
        assert reader.call(begun.id).status is CallStatus.OPEN


def test_a_process_number_used_anew_is_another_process():
    assert processes.process(os.getpid()) == processes.process(os.getpid())
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    name = processes.process(sleeper.pid)
    assert name != processes.process(os.getpid())
    sleeper.kill()
    sleeper.wait()
    assert processes.process(sleeper.pid) == "gone"


def test_migrating_an_old_url_form_is_the_same_store(tmp_path):
    migrate(f"sqlite:///{tmp_path}/x.db")
    with Reader(str(tmp_path / "x.db")) as reader:
        assert list(reader.sessions()) == []
