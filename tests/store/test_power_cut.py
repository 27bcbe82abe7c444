"""A power cut: the process is gone, and of the log only what the disk had confirmed is certain.

With ``synchronous=FULL`` a commit returns after the log is on the disk. A process is therefore
killed while it writes, and its write-ahead log is cut off at any later byte, sometimes with noise
behind the cut as half-written sectors leave it. Whatever was acknowledged before the log was that
long must be there, and all that is there must hold together.
"""

import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from bridle.reconstruct.audit import audit
from bridle.store.reading.queries import Reader
from bridle.store.records import CallStatus
from bridle.store.schema.database import migrate
from bridle.store.writing.writer import Writer

pytestmark = pytest.mark.loop

CUTS = 10
"""Points of each kill; the default suite has 5 kills, ``-m long`` has 45 more."""

CHILD = textwrap.dedent(
    """
    import asyncio, os, sys, time
    import numpy as np
    from bridle.store.call import *
    from bridle.store.records import *
    from bridle.store.writing.writer import Writer

    log = sys.argv[1] + "-wal"

    async def record(writer, session, number):
        parent, prompt, said = None, np.arange(20, dtype=np.uint32), b""
        while True:
            call = new_id("call")
            said += b'{"role":"user","content":"line %d of session %d"},' % (len(prompt), number)
            writer.begin_call(CallBegun(
                id=call, session_id=session, dialect="chat", started_at=time.time(), stream=True,
                request_body=b"[" + said + b"]", model_requested="m", parent_call_id=parent,
                conversation=Conversation((Message("user", said.decode()),), length=1)))
            await asyncio.sleep(0)
            ids = np.array([number, 7, len(prompt)], dtype=np.uint32)
            choice = Choice(ids, np.full(3, -0.5, np.float32), (VersionRun(0, 1),), "stop")
            usage = {"prompt_tokens": len(prompt), "completion_tokens": 3}
            await writer.end_call(CallEnded(
                id=call, session_id=session, status=CallStatus.COMPLETE,
                ended_at=time.time(), prompt_token_ids=prompt,
                choices=(choice,), response_body=call.encode(), usage=usage,
                replies=(Message("assistant", call),),
            ))
            print(call, len(prompt), os.stat(log).st_size, flush=True)
            prompt, parent = np.concatenate([prompt, ids, ids]), call

    async def main():
        writer = Writer(sys.argv[1], synchronous="FULL").start()
        sessions = [new_id("session") for _ in range(4)]
        for session in sessions:
            await writer.add(SessionRecord(session, time.time()))
        await asyncio.gather(*(record(writer, s, n) for n, s in enumerate(sessions)))

    asyncio.run(main())
    """
)


@pytest.fixture
def killed(tmp_path):
    """The function ``killed(seed)``: it makes a store whose writer was killed at some moment.

    It also returns the writer's output: by call, the length of its prompt and that of the log once
    it was acknowledged.
    """

    def make(seed):
        path = tmp_path / "killed" / "b.db"
        migrate(str(path))
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True
        )
        lines = [process.stdout.readline() for _ in range(4)]
        time.sleep(random.Random(seed).random() * 0.15)
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate()
        said = [
            line.split() for line in lines + rest.splitlines(keepends=True) if line[-1:] == "\n"
        ]
        return path, {call: (int(prompt), int(log)) for call, prompt, log in said}

    return make


def cut(path: Path, target: Path, length: int, noise: bytes) -> str:
    """The store as the disk would have it: the database, and ``length`` bytes of its log."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    shutil.copy(path, target / "b.db")
    log = path.with_name("b.db-wal").read_bytes()[:length]
    (target / "b.db-wal").write_bytes(log + noise)
    return str(target / "b.db")


@pytest.mark.parametrize(
    "seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(5, 50))]
)
def test_a_store_survives_a_power_cut_with_every_acknowledged_call(killed, tmp_path, seed):
    path, said = killed(seed)
    whole = path.with_name("b.db-wal").stat().st_size
    confirmed = max(log for _, log in said.values())
    dice = random.Random(seed)
    # The end of what was confirmed, the end of the file, and any byte of the log, torn or not.
    points = [(confirmed, b""), (whole, b"")]
    points += [
        (dice.randrange(whole + 1), dice.randbytes(dice.choice((0, 0, 512, 8192))))
        for _ in range(CUTS - len(points))
    ]
    for length, noise in points:
        url = cut(path, tmp_path / "cut", length, noise)
        with Writer(url) as writer, Reader(url) as reader:
            audited = list(audit(reader, bodies=True))
            assert [found for one in audited for found in one.violations] == []
            calls = [call for one in audited for call in reader.calls(one.session_id)]
            assert {call.status for call in calls} <= {CallStatus.COMPLETE, CallStatus.INTERRUPTED}
            there = {c.id: c.prompt_tokens for c in calls if c.status is CallStatus.COMPLETE}
            expected = {call: prompt for call, (prompt, log) in said.items() if log <= length}
            assert expected.items() <= there.items(), (length, whole)
            assert writer.stats.interrupted == len(calls) - len(there)
