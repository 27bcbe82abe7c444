"""A long array of prompt ids is cut out of a reply only where it certainly is one."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridle.proxy.engines.reply import ReplyDecoder
from bridle.proxy.wire.canonical import ApiError, Minted, Started
from bridle.proxy.wire.cut_ids import (
    PLACEHOLDER,
    WORTH_CUTTING,
    KnownPrompt,
    PromptCut,
    cut_prompt_ids,
)
from bridle.store.tree import Point, TokenTree

LONG = [number % 4_294_967_296 for number in range(0, 400_000_000, 80_000)]


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def started(payload: bytes) -> Started:
    minted = Minted(call_id="call_x", created=0, response_id="r", model="m")
    event = ReplyDecoder(minted, choices=1, detail=False).events(payload)[0]
    assert isinstance(event, Started)
    return event


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20),
    st.booleans(),
    st.sampled_from(["", '"prompt_token_ids":[1]', '\\"prompt_token_ids":[1,2]', "]"]),
)
def test_cut_ids_are_the_decoded_ids(ids: list[int], spaced: bool, text: str) -> None:
    body = {"note": text * 2, "prompt_token_ids": ids * 1500, "choices": [], text: 1}
    payload = json.dumps(body).encode() if spaced else compact(body)
    found = started(payload).prompt_token_ids
    assert found is not None
    assert list(found) == ids * 1500


def test_a_long_array_is_cut_and_its_place_marked() -> None:
    rest, ids = cut_prompt_ids(compact({"choices": [], "prompt_token_ids": LONG, "after": 1}))
    assert json.loads(rest) == {"choices": [], "prompt_token_ids": PLACEHOLDER, "after": 1}
    assert ids is not None
    assert ids.dtype == np.uint32
    assert ids.tolist() == LONG


@pytest.mark.parametrize(
    "array",
    [
        b"[1,,2",
        b"[,1",
        b"[1,",
        b"[-1",
        b"[1.5",
        b"[1e3",
        b"[[1",
        b"[4294967296",
        b"[99999999999999999999999",
    ],
)
def test_what_is_no_array_of_ids_is_left_to_the_decoder_which_refuses_it(array: bytes) -> None:
    long = b"[" + b"1," * WORTH_CUTTING + array[1:]
    payload = b'{"choices":[],"prompt_token_ids":' + long + b"]}"
    assert cut_prompt_ids(payload) == (payload, None)
    with pytest.raises(ApiError, match="malformed"):
        started(payload)


def test_a_mark_that_the_engine_wrote_itself_is_malformed() -> None:
    with pytest.raises(ApiError, match="malformed"):
        started(compact({"choices": [], "prompt_token_ids": PLACEHOLDER}))


def test_ids_under_another_key_of_the_same_name_are_not_taken_for_the_prompts() -> None:
    body = {"extra": {"prompt_token_ids": LONG}, "prompt_token_ids": [1, 2], "choices": []}
    assert list(started(compact(body)).prompt_token_ids or ()) == [1, 2]


def told(ids: list[int]) -> bytes:
    return ",".join(map(str, ids)).encode()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 200), min_size=1, max_size=8), min_size=1, max_size=12))
def test_a_prompt_read_after_any_other_is_the_same_ids(prompts: list[list[int]]) -> None:
    known = KnownPrompt()
    for ids in prompts:
        for prompt in (ids, ids, [*ids, 7], [*ids[:-1], ids[-1] * 10], ids[:1]):
            found = known.read(told(prompt))
            assert found is not None
            assert found.tolist() == prompt


def test_only_what_a_prompt_adds_is_read() -> None:
    known = KnownPrompt()
    first = known.read(told(LONG))
    again = known.read(told(LONG))
    assert again is first
    assert known.read(told(LONG) + b",x") is None
    longer = known.read(told([*LONG, 5]))
    assert longer is not None
    assert longer.tolist() == [*LONG, 5]


def reply_of(known: KnownPrompt, ids: list[int]) -> np.ndarray:
    """Return the ids that are cut out of a reply with this prompt."""
    payload = compact({"choices": [], "prompt_token_ids": ids, "after": 1})
    rest, found = cut_prompt_ids(payload, known)
    assert json.loads(rest)["prompt_token_ids"] == PLACEHOLDER
    assert found is not None
    assert found.tolist() == ids
    return found


def test_a_prompt_that_was_sent_is_neither_read_nor_copied_again() -> None:
    known, tree = KnownPrompt(), TokenTree("s")
    ids = [*LONG]
    growing = reply_of(known, ids)
    for _ in range(200):
        growth = tree.grow("c", growing, [], None, 0)
        point = Point(tree.nodes[growth.prompt_span_id], len(growing))
        known.settle(growing, point)
        sent, text = known.followed(point, np.asarray([1, 2, 3], dtype=np.uint32))
        other, _ = known.followed(point, np.asarray([4], dtype=np.uint32))
        assert other.tolist() == [*ids, 4]
        ids += [1, 2, 3]
        assert (sent.tolist(), b"".join(text)) == (ids, told(ids))
        known.followed(point, np.asarray([1, 2, 3], dtype=np.uint32))
        growing = reply_of(known, ids)
        tree = TokenTree("s")
    assert len(text) < 5
    assert reply_of(known, ids) is growing
    assert reply_of(known, [*ids, 9]) is not growing
    assert not growing.flags.writeable


def test_a_prompt_of_a_session_that_grows_stays_where_it_is() -> None:
    known, tree = KnownPrompt(), TokenTree("s")
    read = reply_of(known, LONG)
    places = set()
    for number in range(100):
        growth = tree.grow(f"c{number}", read, [], None, 0)
        point = Point(tree.nodes[growth.prompt_span_id], len(read))
        known.settle(read, point)
        sent, _ = known.followed(point, np.asarray([number], dtype=np.uint32))
        read = reply_of(known, [*LONG, *range(number + 1)])
        assert read is sent
        places.add(read.ctypes.data)
    assert len(places) == 1


@pytest.mark.parametrize("step", [1, 7, 4096, 1 << 20])
@pytest.mark.parametrize("change", ["", "cut short", "another id", "a longer one", "a space"])
def test_ids_that_were_sent_are_taken_out_of_a_stream(step: int, change: str) -> None:
    known, ids = KnownPrompt(), LONG[:2000]
    assert known.read(told(ids)) is not None
    changed = {"cut short": ids[:-1], "another id": [*ids[:-1], 7], "a longer one": [*ids, 5]}
    array = compact(changed.get(change, ids))
    if change == "a space":
        array = array.replace(b",", b", ", 1)
    head, tail = b'data: {"id":"a","prompt_token_ids":', b',"choices":[]}\n\ndata: [DONE]\n\n'
    stream = head + array + tail
    first = len(head) + 1
    pieces = [stream[:first], *(stream[at : at + step] for at in range(first, len(stream), step))]
    cut = PromptCut(known)
    rest = b"".join(map(cut.feed, pieces)) + cut.end()
    if change:
        assert cut.taken is None
        assert rest == stream
    else:
        assert cut.taken is not None
        assert cut.taken.tolist() == ids
        assert rest == head + compact(PLACEHOLDER) + tail


def test_a_stream_that_ends_within_its_ids_is_whole_again() -> None:
    known = KnownPrompt()
    assert known.read(told(LONG)) is not None
    stream = b'data: {"prompt_token_ids":' + compact(LONG)[:3000]
    cut = PromptCut(known)
    assert cut.feed(stream) + cut.end() == stream
    assert cut.feed(b"more") == b"more"
