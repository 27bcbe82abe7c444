"""``bridle bench reconstruct``: the speed from the store to samples, and the memory that it takes.

Builds a store of sessions of ten turns, then reads every session into samples as a trainer does
(``bridle.reconstruct.episodes``). Time is the CPU time of the one process, which does not depend on
other load on the machine. Tokens are unique ones: those of each span count once. A process of its
own reads, so that its peak memory is its own.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from bridle.bench.corpus import corpus
from bridle.bench.session import OBSERVED, SAMPLED, session_record
from bridle.reconstruct.episodes import episodes
from bridle.store.call import CallBegun, CallEnded
from bridle.store.reading.queries import Reader
from bridle.store.records import (
    CallStatus,
    Choice,
    Conversation,
    Message,
    Sampler,
    VersionRun,
    new_id,
)
from bridle.store.schema.database import migrate
from bridle.store.tree import TokenTree
from bridle.store.writing.writer import Writer

SESSIONS: Final = 1000
TURNS: Final = 10

_TOOLS: Final = ({"type": "function", "function": {"name": "run_shell_command"}},)


def bench(sessions: int = SESSIONS, turns: int = TURNS) -> dict[str, Any]:
    """Return ``tokens_per_s`` (of CPU time), ``peak_rss_mb``, and the numbers of what was read."""
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
        path = str(Path(folder) / "bench.db")
        fill(path, sessions, turns)
        reading = subprocess.run(
            [sys.executable, "-m", "bridle.bench.reconstruct", path],
            check=True,
            stdout=subprocess.PIPE,
        )
        found: dict[str, Any] = json.loads(reading.stdout)
        return found


def fill(path: str, sessions: int, turns: int) -> None:
    """Write a store of sessions that grow by 600 tokens per turn, with as much text."""
    migrate(path)
    random, text = np.random.default_rng(0), corpus().code
    with Writer(path, synchronous="OFF") as writer:
        for number in range(sessions):
            session = session_record(f"bench-{number}")
            writer.add_sync(session)
            prompt, parent, tree = np.empty(0, dtype=np.uint32), None, TokenTree(session.id)
            for turn in range(turns):
                prompt = np.concatenate([prompt, _ids(random, OBSERVED)])
                ids, call_id, now = _ids(random, SAMPLED), new_id("call"), time.time()
                logprobs = -random.random(SAMPLED).astype(np.float32)
                at = int(random.integers(len(text) - 2400))
                result = Message("tool", text[at : at + 1800])
                reply = Message("assistant", text[at + 1800 : at + 2400])
                messages = [result.to_chat()]
                body = orjson.dumps({"model": "policy", "turn": turn, "messages": messages})
                begun = CallBegun(
                    id=call_id,
                    session_id=session.id,
                    dialect="chat",
                    started_at=now,
                    request_body=body,
                    stream=True,
                    model_requested="policy",
                    parent_call_id=parent,
                    conversation=Conversation((result,), tools=_TOOLS, length=2 * turn + 1),
                )
                choices = (Choice(ids, logprobs, (VersionRun(0, 1),), "stop"),)
                ended = CallEnded(
                    id=call_id,
                    session_id=session.id,
                    status=CallStatus.COMPLETE,
                    ended_at=now,
                    prompt_token_ids=prompt,
                    choices=choices,
                    growth=tree.grow(call_id, prompt, choices),
                    response_body=orjson.dumps({"id": call_id, "choices": [reply.to_chat()]}),
                    usage={"prompt_tokens": len(prompt), "completion_tokens": SAMPLED},
                    replies=(reply,),
                    sampler=Sampler("processed"),
                )
                writer.begin_call(begun)
                writer.end_call_sync(ended)
                prompt, parent = np.concatenate([prompt, ids]), call_id


def read(path: str) -> dict[str, Any]:
    """Read the whole store into samples, one session at a time."""
    tokens = samples = sessions = 0
    with Reader(path) as reader:
        before = peak_rss_mb()
        started, wall = time.process_time(), time.perf_counter()
        for episode in episodes(reader):
            sessions += 1
            samples += len(episode.samples)
            # Ten turns of one line are one sample, which holds each of its tokens once.
            tokens += sum(len(sample.token_ids) for sample in episode.samples)
        spent, wall = time.process_time() - started, time.perf_counter() - wall
    return {
        "tokens_per_s": round(tokens / spent),
        "tokens_per_s_wall": round(tokens / wall),
        "peak_rss_mb": round(peak_rss_mb(), 1),
        "rss_before_mb": round(before, 1),
        "sessions": sessions,
        "samples": samples,
        "tokens": tokens,
    }


def peak_rss_mb() -> float:
    """Return the peak memory of this process in MB.

    On Linux this is the program's own peak: ``getrusage`` would include the peak from before the
    program was loaded.
    """
    status = Path("/proc/self/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20) if sys.platform == "darwin" else peak / 1024


def _ids(random: np.random.Generator, count: int) -> Any:
    """Return token ids that are as skewed as those of text."""
    return np.minimum(random.zipf(1.3, count), 32_767).astype(np.uint32)


if __name__ == "__main__":
    print(json.dumps(read(sys.argv[1])))
