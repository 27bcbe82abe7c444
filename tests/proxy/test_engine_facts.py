"""Engines report more of tokens than logprobs, in vLLM's shapes, and it is recorded."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np
import pytest

from bridle.proxy.engines.reply import ReplyDecoder
from bridle.proxy.recording.token_facts import MASK_UNREAD, UNREAD, read_experts, read_kept
from bridle.proxy.wire.canonical import Minted
from bridle.proxy.wire.fold import Fold

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
