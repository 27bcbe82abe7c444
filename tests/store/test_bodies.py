import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.bodies import MAX_DEPTH, Body, Wrappings, body_id, decode, encode, shared_ends


def chain_of(bodies):
    """Each body stored against the one before it."""
    rows, base = [], None
    for data in bodies:
        row = encode(data, base)
        rows.append(row)
        base = Body(row.id, data, row.depth)
    return rows


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


@given(st.lists(texts, min_size=1, max_size=6, unique=True))
def test_every_body_of_a_chain_is_read_back_byte_for_byte(bodies):
    rows = chain_of(bodies)
    for row, data in zip(rows, bodies, strict=True):
        chain, link = [], row
        while link is not None:
            chain.insert(0, link)
            link = next((r for r in rows if r.id == link.base_id), None)
        assert decode(chain) == data


@given(texts, texts)
def test_shared_ends_are_shared_and_do_not_overlap(left, right):
    prefix, suffix = shared_ends(left, right)
    assert left[:prefix] == right[:prefix]
    assert left[len(left) - suffix :] == right[len(right) - suffix :]
    assert prefix + suffix <= min(len(left), len(right))


def test_a_growing_conversation_is_stored_linearly():
    def stored(turns):
        return sum(len(row.data) for row in chain_of(conversation(turns)))

    assert stored(80) <= 2.1 * stored(40)


def test_a_line_that_changes_at_the_top_does_not_store_the_history_again():
    def stored(turns):
        bodies = list(conversation(turns, header=lambda turn: f"billing {turn * 7919 % 997}"))
        return sum(len(row.data) for row in chain_of(bodies))

    assert stored(80) <= 2.2 * stored(40)


def test_replies_share_their_wrapping():
    def reply(call, text):
        return b"".join(
            b'data: {"id":"%s","object":"chat.completion.chunk","model":"policy","choices":'
            b'[{"index":0,"delta":{"content":"%s"}}]}\n\n' % (call, word)
            for word in text.split()
        )

    first = reply(b"call_0", words(0, 20).encode())
    base = Body(body_id(first), first, 0)
    second = reply(b"call_1", words(1, 20).encode())
    row = Wrappings().encode(base, second, body_id(second))
    assert row.base_id == body_id(first)
    assert len(row.data) < len(encode(second).data)
    assert decode([encode(first), row]) == second


def test_a_reply_unlike_the_others_is_stored_whole():
    data = random.Random(0).randbytes(500)
    row = Wrappings().encode(Body(body_id(b"x"), b"x", 0), data, body_id(data))
    assert row.base_id is None


def test_a_dictionary_that_made_room_for_others_is_prepared_again():
    bases = [Body(body_id(text), text, 0) for text in (b"first" * 40, b"second" * 40)]
    wrappings = Wrappings(kept=1)
    for base in bases * 2:
        data = base.data + b"more"
        row = wrappings.encode(base, data, body_id(data))
        assert decode([encode(base.data), row]) == data


def test_no_read_follows_more_links_than_the_bound():
    base = Body("base", b"x" * 1000, MAX_DEPTH)
    assert encode(b"x" * 1000 + b"more", base).base_id is None


def test_a_body_that_was_changed_on_disk_is_an_error():
    row = encode(b"the body as it came")
    damaged = type(row)(row.id, None, 0, 0, row.size, 0, encode(b"another body").data)
    with pytest.raises(ValueError, match="does not have the bytes"):
        decode([damaged])


def test_a_missing_base_is_an_error():
    rows = chain_of(list(conversation(2)))
    with pytest.raises(ValueError, match="needs base"):
        decode(rows[1:])


def test_an_empty_body_is_a_body():
    assert decode([encode(b"")]) == b""
