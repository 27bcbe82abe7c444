import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.store.encoding.bodies import (
    MAX_DEPTH,
    Body,
    BodyRow,
    body_id,
    decode,
    proved,
    shared_ends,
    splice,
    whole,
)
from bridle.store.encoding.packing import DICTIONARY, pack


def splices_of(bodies):
    """Each body after the first against the one before it; ``None`` where it stands alone."""
    found, base = [], None
    for data in bodies:
        piece = None if base is None else splice(data, base)
        found.append(piece)
        base = Body(body_id(data), data, 0 if piece is None else base.depth + 1)
    return found


def stored(bodies):
    """Bytes of a conversation's bodies as they are packed for good, and alone."""
    bodies = list(bodies)
    pieces = splices_of(bodies)
    return sum(
        len(whole(data).data if piece is None else pack(piece.data))
        for piece, data in zip(pieces, bodies, strict=True)
    )


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
    before = b""
    for piece, data in zip(splices_of(bodies), bodies, strict=True):
        read = decode([whole(data)]) if piece is None else piece.apply(before)
        assert read == data
        before = data


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


def test_what_replaces_much_is_packed_against_it_when_that_pays():
    base = Body("base", words(1, 300).encode(), 0)
    again = splice(b"x" + base.data[1:-1] + b"y", base)
    assert again is not None
    assert again.data[0] == DICTIONARY


def test_a_body_unlike_its_base_is_stored_whole_for_all_sessions():
    base = Body("base", words(1, 300).encode(), 0)
    assert splice(words(2, 300).encode(), base) is None


def test_a_body_sent_again_adds_nothing():
    base = Body("base", words(1, 300).encode(), 0)
    again = splice(base.data, base)
    assert again is not None
    assert again.apply(base.data) == base.data
    assert len(again.data) == 1


def test_no_read_follows_more_links_than_the_bound():
    base = Body("base", b"x" * 1000, MAX_DEPTH)
    assert splice(b"x" * 1000 + b"more", base) is None


def test_a_body_that_was_changed_on_disk_is_an_error():
    row = whole(b"the body as it came")
    damaged = BodyRow(row.id, None, 0, 0, row.size, 0, whole(b"another body").data)
    with pytest.raises(ValueError, match="does not have the bytes"):
        decode([damaged])
    with pytest.raises(ValueError, match="does not have the bytes"):
        proved(b"another body", row.id)


def test_rows_against_a_base_are_read_as_older_versions_wrote_them():
    first, second = b"a" * 100 + b"1" + b"z" * 100, b"a" * 100 + b"22" + b"z" * 100
    base = whole(first)
    row = BodyRow(body_id(second), base.id, 100, 100, len(second), 1, pack(b"22"))
    assert decode([base, row]) == second
    with pytest.raises(ValueError, match="needs base"):
        decode([row])


def test_an_empty_body_is_a_body():
    assert decode([whole(b"")]) == b""
