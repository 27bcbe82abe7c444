"""Engines report more of tokens than logprobs, in vLLM's shapes, and it is recorded."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridle.proxy.continuation.prompt import CallPrompt
from bridle.proxy.dialects.chat.request import parse_on
from bridle.proxy.engines.reply import ReplyDecoder
from bridle.proxy.recording import token_facts
from bridle.proxy.recording.metrics import Metrics
from bridle.proxy.recording.recorder import Recorder
from bridle.proxy.recording.token_facts import MASK_UNREAD, UNREAD, read_experts, read_kept
from bridle.proxy.session.memory import SessionMemory
from bridle.proxy.session.session import Session
from bridle.proxy.wire.canonical import Finished, Minted, Started, Tokens, Usage
from bridle.proxy.wire.fold import Fold
from bridle.proxy.wire.histories import Known
from bridle.store.call import EndedFacts
from bridle.store.clock import Stopwatch
from bridle.store.reading.queries import Reader
from bridle.store.records import CallStatus, SessionRecord
from bridle.store.schema.database import migrate
from bridle.store.writing.writer import Writer

MINTED = Minted("call_abcdefghij234567klmnopqr", 1, "chatcmpl-x", "m")
PROMPT, SAMPLED = 4, 3


def encoded(array: Any) -> str:
    """Return an array as vLLM's ``numpy2base64`` writes it."""
    with io.BytesIO() as file:
        np.save(file, array, allow_pickle=False)
        return base64.b64encode(file.getbuffer()).decode()


def test_experts_stand_beside_the_token_that_they_predict() -> None:
    given = np.arange((PROMPT + SAMPLED - 1) * 4, dtype=np.uint8).reshape(-1, 2, 2)
    found = read_experts(encoded(given), PROMPT, SAMPLED)
    assert found.notes == ()
    assert found.prompt is not None
    assert found.sampled is not None
    assert not found.prompt[0].any()
    assert np.array_equal(np.concatenate([found.prompt, found.sampled])[1:], given)


def test_no_experts_are_none() -> None:
    assert read_experts(None, PROMPT, SAMPLED) == (None, None, ())


@pytest.mark.parametrize(
    "text",
    [
        "%",
        encoded(np.zeros(6, np.uint8)),
        encoded(np.zeros((6, 2, 2), np.float32)),
        encoded(np.zeros((7, 2, 2), np.uint8)),
        encoded(np.full((6, 2, 2), 40_000, np.uint16)),
        encoded(np.zeros((6, 2, 2), np.uint8))[:-8],
        encoded(np.zeros((0, 2, 2), np.uint8)),
    ],
)
def test_experts_that_cannot_be_of_these_tokens_are_a_note(text: str) -> None:
    found = read_experts(text, PROMPT, SAMPLED)
    assert (found.prompt, found.sampled) == (None, None)
    assert [note.name for note in found.notes] == [UNREAD]


def reply(*payloads: Any) -> Any:
    decoder = ReplyDecoder(MINTED, choices=1, detail=False)
    fold = Fold()
    for payload in payloads:
        fold.take(decoder.events(json.dumps(payload).encode()))
    fold.take(decoder.last_events())
    return fold.reply()


def chunk(ids: list[int], **more: Any) -> dict[str, Any]:
    content = [{"token": "t", "logprob": -0.5} for _ in ids]
    choice = {"index": 0, "delta": {}, "token_ids": ids, "logprobs": {"content": content}}
    return {"choices": [choice | more]}


def test_sets_of_a_stream_keep_their_tokens() -> None:
    (choice,) = reply(
        chunk([5], sampling_mask=[[5]]),
        chunk([6, 7], sampling_mask=[[6, 9], [7]]),
        chunk([], finish_reason="stop", routed_experts="abc"),
    ).choices
    assert list(map(list, choice.kept)) == [[5], [6, 9], [7]]
    kept, notes = read_kept(choice.kept, 3)
    assert kept is not None
    assert (kept.counts.tolist(), kept.ids.tolist(), notes) == ([1, 2, 1], [5, 6, 9, 7], ())
    kept, notes = read_kept(choice.kept, 4)
    assert (kept, [note.name for note in notes]) == (None, [MASK_UNREAD])
    assert choice.routed_experts == "abc"


async def test_facts_of_tokens_are_read_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "bridle.db")
    migrate(path)
    threads: list[threading.Thread] = []

    def reading(*given: Any) -> Any:
        threads.append(threading.current_thread())
        return read_experts(*given)

    monkeypatch.setattr(token_facts, "read_experts", reading)
    given = np.arange((PROMPT + SAMPLED - 1) * 4, dtype=np.uint8).reshape(-1, 2, 2)
    with Writer(path) as writer, closing(Reader(path)) as reader:
        session = Session(SessionRecord("ses_1", time.time()))
        await writer.add(session.record)
        recorder = Recorder(writer, SessionMemory(reader, 1 << 20), Metrics({}))
        body = b'{"model": "m", "messages": [{"role": "user", "content": "Go."}]}'
        request, history, _ = parse_on(body, {}, {}, Known(()))
        link, ids = session.find(request, None, history), np.arange(PROMPT, dtype=np.uint32)
        recording = recorder.begin(session, request, body, {}, Stopwatch(), link, CallPrompt(ids))
        experts = encoded(given)
        recording.fold.take([Started(PROMPT, ids), Tokens([5, 6, 7], [-0.5] * SAMPLED)])
        recording.fold.take([Finished("stop", routed_experts=experts), Usage(PROMPT, SAMPLED)])
        ended = await recorder.commit(recording, EndedFacts(status=CallStatus.COMPLETE))
    assert ended.prompt_experts is not None
    assert np.array_equal(ended.choices[0].routed_experts, given[-SAMPLED:])
    assert threading.current_thread() not in threads
    assert len(threads) == 1


@pytest.mark.parametrize(
    ("metrics", "counts"),
    [
        ({"speculative_decoding": {"num_draft_tokens": 9, "num_accepted_draft_tokens": 4}}, (9, 4)),
        ({"speculative_decoding": None}, (None, None)),
        ({"speculative_decoding": {"num_draft_tokens": "many"}}, (None, None)),
        ("none", (None, None)),
    ],
)
def test_drafted_and_accepted_tokens_are_part_of_the_usage(metrics: Any, counts: Any) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 1}
    last = {"choices": [], "usage": usage, "metrics": metrics}
    found = reply(chunk([5], finish_reason="stop"), last).usage
    assert (found.draft_tokens, found.accepted_draft_tokens) == counts
