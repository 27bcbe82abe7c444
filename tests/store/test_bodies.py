import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.store.encoding.bodies import (
    MAX_DEPTH,
    Earlier,
    pack_request,
    pack_whole,
    proved,
    sha256_of,
    shared_ends,
    texts_of,
    unpack_request,
    unpack_whole,
)
from bridle.store.encoding.packing import DICTIONARY, RAW
from bridle.store.records import Message, ToolCall


def chain(bodies):
    """Each body against the one before it, or whole."""
    found, base = [], None
    for data in bodies:
        packed = pack_request(data, base, b"") or pack_whole(data, b"")
        found.append(packed)
        base = Earlier(data, packed.depth)
    return found


def stored(bodies):
    """Bytes of a conversation's bodies without any text of their messages."""
    return sum(len(packed.data) for packed in chain(bodies))


def words(seed, count):
    source = random.Random(seed)
    return " ".join(f"{source.choice('abcdefgh')}{source.randrange(9999)}" for _ in range(count))


def conversation(turns, header=lambda turn: "system"):
    tools = words("tools", 400)
    for turn in range(1, turns + 1):
        messages = ",".join(f'"{words(n, 60)}"' for n in range(turn))
        yield f'{{"system":"{header(turn)}","messages":[{messages}],"tools":"{tools}"}}'.encode()


texts = st.lists(st.sampled_from([b"aaaa", b"bb", b"c", b"0123456789" * 40]), max_size=12).map(
    b"".join
)


@given(st.lists(texts, min_size=1, max_size=6), texts, texts)
def test_every_body_of_a_chain_is_read_back_byte_for_byte(bodies, replies, own):
    base = None
    for data in bodies:
        packed = pack_request(data, base, own)
        if packed is None:
            packed = pack_whole(data, own)
            assert unpack_whole(packed, own) == data
        else:
            assert unpack_request(packed, base.data, replies, own) == data
        base = Earlier(data, packed.depth, replies)


@given(texts, texts)
def test_shared_ends_are_shared_and_do_not_overlap(left, right):
    prefix, suffix = shared_ends(left, right)
    assert left[:prefix] == right[:prefix]
    assert left[len(left) - suffix :] == right[len(right) - suffix :]
    assert prefix + suffix <= min(len(left), len(right))


def test_a_growing_conversation_is_stored_linearly():
    assert stored(conversation(80)) <= 2.1 * stored(conversation(40))


def test_a_line_that_changes_at_the_top_does_not_store_the_history_again():
    def changing(turns):
        return stored(conversation(turns, header=lambda turn: f"billing {turn * 7919 % 997}"))

    assert changing(80) <= 2.2 * changing(40)


def test_what_the_messages_say_is_not_stored_again():
    call = ToolCall("call_1", "look", '{"path":"a \\"b\\""}')
    message = Message("assistant", words(1, 300), "hm", (call,))
    body = f"[{message.to_chat()}]".encode()
    packed = pack_whole(body, texts_of([message]))
    assert packed.data[0] == DICTIONARY
    assert len(packed.data) < len(body) / 10


def test_a_reply_that_came_too_late_for_the_base_is_not_needed():
    first = Earlier(words(1, 300).encode(), 0)
    data = first.data + words(2, 300).encode()
    packed = pack_request(data, first, words(2, 300).encode())
    assert unpack_request(packed, first.data, b"a reply since then", words(2, 300).encode()) == data


def test_a_body_unlike_its_base_is_stored_whole():
    base = Earlier(words(1, 300).encode(), 0)
    assert pack_request(words(2, 300).encode(), base, b"") is None


def test_a_body_sent_again_adds_nothing():
    base = Earlier(words(1, 300).encode(), 0)
    again = pack_request(base.data, base, b"")
    assert again.data == bytes((RAW,))


def test_no_read_follows_more_links_than_the_bound():
    base = Earlier(b"x" * 1000, MAX_DEPTH)
    assert pack_request(b"x" * 1000 + b"more", base, b"") is None


def test_a_body_that_was_changed_on_disk_is_an_error():
    digest = sha256_of(b"the body as it came").hex()
    assert proved(b"the body as it came", digest) == b"the body as it came"
    with pytest.raises(ValueError, match="does not have the bytes"):
        proved(b"another body", digest)


def test_another_dictionary_than_the_writers_is_an_error():
    packed = pack_whole(words(1, 300).encode(), words(1, 300).encode())
    with pytest.raises(ValueError, match="damaged"):
        unpack_whole(packed, words(2, 300).encode())


def test_an_empty_body_is_a_body():
    assert unpack_whole(pack_whole(b"", b""), b"") == b""
