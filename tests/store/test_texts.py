"""What a call says in text, packed against the text of its tokens."""

import json

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bridle.store.encoding.bodies import Splice
from bridle.store.encoding.events import from_columns, to_columns
from bridle.store.encoding.packing import pack
from bridle.store.encoding.texts import (
    CallTokens,
    Context,
    Reply,
    Texts,
    lay_out,
    pack_alone,
    pack_texts,
    stands_alone,
    unpack_texts,
)
from bridle.store.encoding.varint import read_varints, varints
from bridle.store.encoding.vocabulary import SEPARATOR, Vocabulary

WORDS = [b" the", b" quick", b" brown", b' "fox"', b"\n", b" jumps", b"\\", b" over", "é".encode()]
VOCABULARY = Vocabulary([*WORDS, *(b" word%d" % number for number in range(300))])


def ids(*values):
    return np.array(values, dtype=np.uint32)


def event(text, call="call_0"):
    delta = {"id": call, "object": "chunk", "choices": [{"delta": {"content": text}, "stop": None}]}
    return f"data: {json.dumps(delta)}\n\n".encode()


def stream(words, call="call_0"):
    return b"".join(event(word, call) for word in words) + b"data: [DONE]\n\n"


@given(st.lists(st.integers(0, 1 << 60)))
def test_numbers_come_back_and_where_they_end(numbers):
    data = varints(numbers)
    assert read_varints(data + b"rest", 0, len(numbers)) == (numbers, len(data))


def test_numbers_that_are_cut_off_are_an_error():
    with pytest.raises(IndexError):
        read_varints(varints([300])[:1], 0, 1)


# -- vocabularies --------------------------------------------------------------------------------


def test_text_of_tokens_is_what_json_has_between_its_quotes():
    said = ids(0, 3, 4, 6, 8, 40)
    (text,) = VOCABULARY.texts([said])
    plain = b"".join([*WORDS, *(b" word%d" % n for n in range(300))][id] for id in said)
    assert json.loads(b'"' + text.replace(SEPARATOR, b"") + b'"') == plain.decode()
    assert text.count(SEPARATOR) == len(said)


def test_every_span_has_its_own_text_and_unknown_tokens_have_none():
    spans = [ids(0, 1), ids(), ids(2), ids(5, 9_999_999, 7)]
    found = [text.replace(SEPARATOR, b"") for text in VOCABULARY.texts(spans)]
    assert found == [b" the quick", b"", b" brown", b" jumps over"]
    assert VOCABULARY.texts([ids(), ids()]) == [b"", b""]
    assert VOCABULARY.texts([ids(9_999_999)]) == [b""]


@given(st.lists(st.binary(max_size=300), max_size=20))
def test_a_vocabulary_comes_back_under_its_own_name(pieces):
    vocabulary = Vocabulary(pieces)
    again = Vocabulary.unpack(vocabulary.packed())
    assert again.id == vocabulary.id
    everything = np.arange(len(pieces), dtype=np.uint32)
    assert again.texts([everything]) == vocabulary.texts([everything])


def test_vocabularies_that_differ_have_other_names():
    assert Vocabulary([b"ab", b"c"]).id != Vocabulary([b"a", b"bc"]).id


# -- streams as columns --------------------------------------------------------------------------


@given(st.lists(st.text(max_size=12), max_size=12), st.sampled_from(["\n\n", "\n", "\r\n\n", ""]))
@example(["one", "two", "three", "four", "\n"], "\n\n")
def test_a_stream_comes_back_byte_for_byte_if_it_has_columns(words, border):
    for data in (
        stream(words),
        border.join(words).encode(),
        border.join(f'data: {{"a":"{word}"}}' for word in words).encode(),
        b"".join(b"event: delta\n" + event(word) for word in words),
    ):
        columns = to_columns(data)
        assert columns is None or from_columns(columns) == data


def test_what_events_share_is_kept_once():
    data = stream(["same", "text", "again", "and", "again"] * 40)
    columns = to_columns(data)
    assert columns is not None
    assert len(columns) < len(data) / 10


def test_words_that_begin_alike_share_no_more_than_others():
    short = to_columns(stream(["the", "then", "there", "these"] * 10))
    other = to_columns(stream(["the", "when", "where", "those"] * 10))
    assert abs(len(short) - len(other)) <= 10


def test_what_is_no_stream_of_events_has_no_columns():
    assert to_columns(b'{"id":"one","object":"whole"}') is None
    assert to_columns(b"") is None
    assert to_columns(stream(["a"] * 10) + SEPARATOR) is None


# -- texts ---------------------------------------------------------------------------------------

PARTS = st.builds(
    Texts,
    st.none() | st.builds(Splice, st.integers(0, 10**6), st.integers(0, 10**6), st.binary()),
    st.binary(max_size=200),
    st.binary(max_size=200),
    st.none() | st.binary(min_size=1).map(Reply.of),
)


@given(PARTS, st.lists(st.integers(0, 400), max_size=30), st.booleans())
def test_texts_come_back_whatever_they_are_packed_against(texts, said, streamed):
    tokens = CallTokens(ids(*said), None, (ids(*said), ids()))
    laid_out = lay_out(texts)
    for context in (
        Context(b"", None, streamed),
        Context(b"wrapping" * 9, VOCABULARY, streamed),
    ):
        packed = pack_texts(laid_out, context, tokens)
        assert unpack_texts(packed, context.dictionary(tokens)) == texts
    alone = pack_alone(laid_out)
    assert stands_alone(alone)
    assert unpack_texts(alone) == unpack_texts(pack(laid_out)) == texts


@pytest.mark.parametrize("context", [None, Context(b"", None, False)])
def test_no_flipped_bit_changes_what_a_call_said(context):
    """Texts that lean on others have a checksum in their frame, those that stand alone as well."""
    said = Texts(None, b'{"tail":[1]}', b'{"content":"four"}' * 3, Reply.of(b'{"id":"x"}'))
    laid_out = lay_out(said)
    tokens = CallTokens(None, None, ())
    packed = pack_alone(laid_out) if context is None else pack_texts(laid_out, context, tokens)
    found = 0
    for bit in range(8 * len(packed)):
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            assert unpack_texts(bytes(damaged)) == said
        except ValueError:
            found += 1
    assert found > 7 * len(packed)


def test_text_that_the_tokens_say_takes_next_to_no_room():
    random = np.random.default_rng(0)
    said = random.integers(0, len(WORDS) + 300, 400).astype(np.uint32)
    text = VOCABULARY.texts([said])[0].replace(SEPARATOR, b"")
    message = b'{"role":"assistant","content":"' + text + b'"}'
    texts = Texts(None, b"", message, None)
    tokens = CallTokens(None, None, (said,))
    with_text = pack_texts(lay_out(texts), Context(b"", VOCABULARY, False), tokens)
    without = pack_texts(lay_out(texts), Context(b"", None, False), tokens)
    assert 10 * len(with_text) < len(without)


def test_a_streamed_reply_is_coded_by_its_tokens():
    random = np.random.default_rng(0)
    said = random.integers(9, len(WORDS) + 300, 300).astype(np.uint32)
    pieces = VOCABULARY.texts([said])[0].decode().split(SEPARATOR.decode())[:-1]
    first, second = (Texts(None, b"", b"", Reply.of(stream(pieces, f"call_{n}"))) for n in (0, 1))
    assert first.kind == "whole/columns"
    tokens = CallTokens(None, None, (said,))
    context = Context.of(first.kind, lay_out(Texts(None, b"", b"", Reply.of(stream("x" * 9)))),
                         VOCABULARY)  # fmt: skip
    packed = pack_texts(lay_out(second), context, tokens)
    assert len(packed) < 150
    assert unpack_texts(packed, context.dictionary(tokens)).reply.data == stream(pieces, "call_1")
