"""``bridle bench store``: bytes per token, growth, and commits per second.

Sizes are those of the SQLite file after a checkpoint, less the file of an empty store. Several
sessions share a store until it holds at least 600 turns, so that half-filled pages, and the first
page of every table and index, which an empty store has already, weigh as they do in use. *Unique*
tokens are those of the token tree: prompts that repeat history count once.

For comparison, the format of other projects is measured: one JSON object per call, as
``json.dumps`` writes it. It holds the request and the engine's reply in full and once, with the
prompt's ids, the sampled ids, and a logprob object per token. ``json_traces_ratio`` compares with
what rLLM's gateway writes for a call when it also keeps the bodies (``TraceRecord`` with
``capture_raw``); there, messages and ids occur twice.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from bridle.bench.corpus import corpus
from bridle.bench.session import Agent, BenchCall, session_record
from bridle.store.call import CallBegun, CallEnded
from bridle.store.reading.queries import Reader
from bridle.store.records import CallStatus, Choice, Conversation, Message, VersionRun, new_id
from bridle.store.schema.database import migrate
from bridle.store.tree import TokenTree
from bridle.store.writing.writer import Writer

TURNS: Final = (10, 30, 100, 200, 300)
_LEAST_TURNS: Final = 600

_CONCURRENT: Final = 64
"""Number of calls that wait for their commit at the same time, each in its own session."""

_COMMIT_TURNS: Final = 40


@dataclass(frozen=True, slots=True)
class Stored:
    """The measured sizes of sessions of one length, in bytes."""

    tokens: int
    sessions: int
    size: int
    json_size: int
    """The size of one JSON object per call."""
    traces_size: int
    """The size of one rLLM trace per call, bodies included."""


def bench(turns: tuple[int, ...] = TURNS, postgresql: str | None = None) -> dict[str, Any]:
    """Return all figures, by the keys that ``bridle bench store --json`` prints."""
    stored = {length: measure_size(length) for length in turns}
    commits = {"sqlite": measure_commits(None)}
    if postgresql is not None:
        commits["postgresql"] = measure_commits(postgresql)
    growth = {}
    if 100 in stored and 200 in stored:
        one, two = (stored[n].size / stored[n].sessions for n in (100, 200))
        growth["100_to_200"] = round(two / one, 3)
    return {
        "bytes_per_token": {str(n): round(s.size / s.tokens, 2) for n, s in stored.items()},
        "growth": growth,
        "json_per_call_ratio": {str(n): round(s.json_size / s.size, 1) for n, s in stored.items()},
        "json_traces_ratio": {str(n): round(s.traces_size / s.size, 1) for n, s in stored.items()},
        "commits_per_s": {name: rate.wall for name, rate in commits.items()},
        "commits_per_cpu_s": {name: rate.cpu for name, rate in commits.items()},
        "synchronous": "FULL",
        "cores": len(os.sched_getaffinity(0)),
    }


def measure_size(turns: int, *, apart: bool = False) -> Stored:
    """Record enough sessions of ``turns`` turns, and measure the file.

    With ``apart``, the beginning of every call is committed before its end, as for calls that take
    a while.
    """
    sessions = max(1, -(-_LEAST_TURNS // turns))
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
        path = Path(folder) / "bench.db"
        migrate(str(path))
        with Writer(str(path)):
            pass
        empty, json_size, traces_size = path.stat().st_size, 0, 0
        with Writer(str(path)) as writer:
            for number in range(sessions):
                session = session_record(f"bench-{number}")
                writer.add_sync(session)
                for call in Agent(corpus(), session, seed=number).calls(turns):
                    writer.begin_call(call.begun)
                    if apart:
                        writer.update_session_sync(session.id, outcome=None)
                    writer.end_call_sync(call.ended)
                    request, reply = json.loads(call.begun.request_body), engine_reply(call)
                    json_size += len(one_json(call, request, reply))
                    traces_size += len(one_trace(call, request, reply))
        with Reader(str(path)) as reader:
            tokens = sum(
                len(span.token_ids)
                for session in reader.sessions()
                for span in reader.spans(session.id)
            )
        return Stored(tokens, sessions, path.stat().st_size - empty, json_size, traces_size)


def one_json(call: BenchCall, request: dict[str, Any], reply: dict[str, Any]) -> str:
    """Return everything about one call, once, in one JSON object, as other projects write it."""
    return json.dumps(
        {
            "id": call.begun.id,
            "session": call.begun.session_id,
            "started_at": call.begun.started_at,
            "ended_at": call.ended.ended_at,
            "request": request,
            "response": reply,
        }
    )


def one_trace(call: BenchCall, request: dict[str, Any], reply: dict[str, Any]) -> str:
    """Return the fields of rLLM's ``TraceRecord`` as JSON, with the raw request and response."""
    choice, ended = reply["choices"][0], call.ended
    return json.dumps(
        {
            "trace_id": call.begun.id,
            "session_id": call.begun.session_id,
            "model": request["model"],
            "messages": request["messages"],
            "prompt_token_ids": reply["prompt_token_ids"],
            "response_message": choice["message"],
            "completion_token_ids": choice["token_ids"],
            "logprobs": [entry["logprob"] for entry in choice["logprobs"]["content"]],
            "finish_reason": choice["finish_reason"],
            "weight_version": ended.choices[0].versions[0].version,
            "latency_ms": 1000 * (ended.ended_at - call.begun.started_at),
            "token_counts": {
                "prompt": ended.usage["prompt_tokens"],
                "completion": ended.usage["completion_tokens"],
            },
            "timestamp": ended.ended_at,
            "metadata": {},
            "raw_request": request,
            "raw_response": reply,
        }
    )


def engine_reply(call: BenchCall) -> dict[str, Any]:
    """Return the call's chat completion as vLLM sends it.

    vLLM sends it so for a request with ``return_token_ids`` and ``logprobs``.
    """
    ended = call.ended
    prompt = ended.prompt_token_ids
    return {
        "id": f"chatcmpl-{call.begun.id}",
        "object": "chat.completion",
        "created": int(ended.ended_at),
        "model": ended.model_served,
        "prompt_token_ids": [] if prompt is None else prompt.tolist(),
        "choices": [
            {
                "index": index,
                "message": ended.replies[index].to_chat(),
                "logprobs": {"content": _logprob_objects(choice)},
                "finish_reason": choice.finish_reason,
                "token_ids": choice.token_ids.tolist(),
            }
            for index, choice in enumerate(ended.choices)
        ],
        "usage": dict(ended.usage),
    }


def _logprob_objects(choice: Choice) -> list[dict[str, Any]]:
    """Return one logprob object for each sampled token, with its text also as bytes."""
    pieces = corpus().pieces(choice.token_ids)
    return [
        {
            "token": piece,
            "bytes": list(piece.encode()),
            "logprob": logprob,
            "top_logprobs": [],
        }
        for piece, logprob in zip(pieces, choice.logprobs.tolist(), strict=True)
    ]


# -- commits -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rate:
    """Committed calls per second: of the wall clock, and of this process's CPU time."""

    wall: float
    cpu: float


def measure_commits(url: str | None) -> Rate:
    """Measure commits of calls that each bring 2 KB of new text.

    SQLite writes with ``synchronous=FULL``, PostgreSQL as the server is configured.
    """
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
        address = url or str(Path(folder) / "bench.db")
        migrate(address)
        sessions = [session_record(f"commits-{new_id('b')}") for _ in range(_CONCURRENT)]
        lines = [list(_small_calls(session.id, seed)) for seed, session in enumerate(sessions)]
        with Writer(address, synchronous="FULL") as writer:
            for session in sessions:
                writer.add_sync(session)
            return asyncio.run(_commit_all(writer, lines))


async def _commit_all(writer: Writer, lines: list[list[BenchCall]]) -> Rate:
    async def one(line: list[BenchCall]) -> None:
        for call in line:
            writer.begin_call(call.begun)
            await writer.end_call(call.ended)

    wall, cpu, calls = time.perf_counter(), time.process_time(), sum(map(len, lines))
    await asyncio.gather(*map(one, lines))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Rate(round(calls / wall, 1), round(calls / cpu, 1))


def _small_calls(session_id: str, seed: int) -> Iterator[BenchCall]:
    """Yield calls that add 1.5 KB to the request and answer with 0.5 KB.

    They come with the tokens of both.
    """
    random, text = np.random.default_rng(seed), corpus().code
    tree = TokenTree(session_id)
    at, prompt, parent, history = seed * 9_973 % len(text), np.empty(0, np.uint32), None, b"["
    for turn in range(_COMMIT_TURNS):
        asked, said = text[at : at + 1500], text[at + 1500 : at + 2000]
        at = (at + 2000) % (len(text) - 2000)
        history += orjson.dumps({"role": "user", "content": asked}) + b","
        new = random.integers(0, 32_768, 375).astype(np.uint32)
        prompt = np.concatenate([prompt, new])
        ids = random.integers(0, 32_768, 125).astype(np.uint32)
        logprobs = -random.random(125).astype(np.float32)
        now, call_id = time.time(), new_id("call")
        reply = Message("assistant", said)
        begun = CallBegun(
            id=call_id,
            session_id=session_id,
            dialect="chat",
            started_at=now,
            request_body=history + b"{}]",
            stream=True,
            model_requested="policy",
            parent_call_id=parent,
            conversation=Conversation((Message("user", asked),), length=2 * turn + 1),
        )
        choices = (Choice(ids, logprobs, (VersionRun(0, 1),), "stop"),)
        ended = CallEnded(
            id=call_id,
            session_id=session_id,
            status=CallStatus.COMPLETE,
            ended_at=now,
            prompt_token_ids=prompt,
            choices=choices,
            growth=tree.grow(call_id, prompt, choices),
            response_body=orjson.dumps({"id": call_id, "message": reply.to_chat()}),
            usage={"prompt_tokens": len(prompt), "completion_tokens": len(ids)},
            replies=(reply,),
        )
        yield BenchCall(begun, ended)
        parent, prompt = call_id, np.concatenate([prompt, ids])
        history += orjson.dumps(reply.to_chat()) + b","
