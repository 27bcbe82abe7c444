"""Server-sent events cut anywhere are read as if they had come whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.proxy.wire.sse import EventTooLarge, SseParser


def payloads(stream: bytes, cuts: tuple[int, ...] = ()) -> list[bytes]:
    parser = SseParser()
    found: list[bytes] = []
    start = 0
    for cut in (*sorted(cuts), len(stream)):
        found += parser.feed(stream[start:cut])
        start = max(start, cut)
    return found + parser.finish()


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"data: one\n\ndata: two\n\n", [b"one", b"two"]),
        (b"data:one\n\n", [b"one"]),
        (b"data:  one\n\n", [b" one"]),
        (b"data: one\r\n\r\ndata: two\r\n\r\n", [b"one", b"two"]),
        (b"data: one\r\rdata: two\r\r", [b"one", b"two"]),
        (b"data: one\ndata: two\n\n", [b"one\ntwo"]),
        (b": keep-alive\n\ndata: one\n\n", [b"one"]),
        (b"event: x\nid: 3\nretry: 9\ndata: one\n\n", [b"one"]),
        (b"data: one\n\n\n\n\ndata: two\n\n", [b"one", b"two"]),
        (b"data: one\n\ndata: no blank line after", [b"one", b"no blank line after"]),
        (b"data\n\n", []),
        (b"data: \n\ndata:\n\ndata: one\n\n", [b"one"]),
        (b"\xef\xbb\xbfdata: one\n\n", [b"one"]),
        (b'data: one\n\nerror: {"code": 500}\n\n', [b"one", b'{"error": {"code": 500}}']),
        (b": note\n\nerror:it broke\r\n\r\n", [b'{"error": "it broke"}']),
        (b"", []),
    ],
)
def test_data_lines_are_payloads_and_everything_else_is_skipped(
    stream: bytes, expected: list[bytes]
) -> None:
    assert payloads(stream) == expected


@given(
    lines=st.lists(
        st.sampled_from(
            [b"data: one", b"data: two", b"", b": note", b"event: e", b"error: {}", b"data: "]
        ),
        max_size=12,
    ),
    end=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    cuts=st.lists(st.integers(0, 120), max_size=8),
)
def test_where_the_bytes_are_cut_does_not_matter(
    lines: list[bytes], end: bytes, cuts: list[int]
) -> None:
    stream = b"".join(line + end for line in lines)
    assert payloads(stream, tuple(cuts)) == payloads(stream)


def fed(piece: bytes) -> None:
    parser = SseParser(limit=1000)
    for _ in range(1000):
        parser.feed(piece)


def test_an_event_beyond_the_limit_is_refused_however_it_is_cut() -> None:
    for piece in (b"data: x", b"data: x\n", b": x", b"data: x\n: x\n"):
        with pytest.raises(EventTooLarge):
            fed(piece)
    fed(b": x\n")
    parser = SseParser(limit=1000)
    assert len([parser.feed(b": x\ndata: x\n\n") for _ in range(1000)]) == 1000


def test_a_long_line_takes_time_by_its_bytes() -> None:
    parser = SseParser()
    piece = b"x" * 1000
    for part in (b"data: ", *[piece] * 20_000):
        assert parser.feed(part) == []
    assert len(parser.feed(b"\n\n")[0]) == 20_000_000
