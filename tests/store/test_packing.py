import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from bridle.store.encoding.packing import (
    DICTIONARY,
    dump_json,
    pack,
    pack_against,
    pack_experts,
    pack_ids,
    pack_kept,
    pack_logprobs,
    unpack,
    unpack_against,
    unpack_experts,
    unpack_ids,
    unpack_kept,
    unpack_logprobs,
)
from bridle.store.records import KeptTokens


@given(arrays.arrays(np.uint32, st.integers(0, 300)))
def test_ids_come_back_exactly(ids):
    assert np.array_equal(unpack_ids(pack_ids(ids)), ids)


@given(arrays.arrays(np.uint32, st.integers(0, 600)))
def test_logprobs_come_back_to_the_bit_whatever_the_bits_say(bits):
    logprobs = bits.view(np.float32)
    assert unpack_logprobs(pack_logprobs(logprobs)).tobytes() == logprobs.tobytes()


def test_negative_zero_and_not_a_number_survive():
    logprobs = np.array([-0.0, np.nan, -np.inf] * 200, dtype=np.float32)
    assert unpack_logprobs(pack_logprobs(logprobs)).tobytes() == logprobs.tobytes()


@given(st.integers(0, 40), st.sampled_from([np.uint8, np.uint16]), st.data())
def test_experts_come_back_exactly(tokens, kind, data):
    experts = data.draw(arrays.arrays(kind, (tokens, 3, 2)))
    found = unpack_experts(pack_experts(experts))
    assert found.dtype == kind
    assert np.array_equal(found, experts)


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=9), max_size=40))
def test_the_sets_that_tokens_were_drawn_from_come_back_exactly(sets):
    kept = KeptTokens.of(sets)
    found = unpack_kept(pack_kept(kept))
    assert np.array_equal(found.counts, kept.counts)
    assert np.array_equal(found.ids, kept.ids)
    assert found.first(3).ids.tolist() == [one for each in sets[:3] for one in each]


@pytest.mark.parametrize("packed", [b"", b"\0", pack(b"\3\1\0\1\0ab"), pack(b"\2\1\0\1\0abc")])
def test_damaged_experts_are_an_error(packed):
    with pytest.raises((ValueError, IndexError)):
        unpack_experts(packed)


@pytest.mark.parametrize("cut", [0, 2, 5, -1])
def test_damaged_sets_are_an_error(cut):
    with pytest.raises(ValueError, match=r"damaged|buffer"):
        unpack_kept(pack_kept(KeptTokens.of([[3, 4], [5]]))[:cut])


@given(st.binary(max_size=4096))
def test_bytes_come_back_and_never_grow_by_more_than_the_codec(data):
    packed = pack(data)
    assert unpack(packed) == data
    assert len(packed) <= len(data) + 1


def test_real_token_ids_take_less_than_their_four_bytes():
    ids = np.minimum(np.random.default_rng(0).zipf(1.3, 600), 150_000).astype(np.uint32)
    assert len(pack_ids(ids)) < 2 * len(ids)


def test_ids_outside_uint32_are_refused():
    with pytest.raises(OverflowError):
        pack_ids([-1])


def test_an_unknown_codec_is_an_error():
    with pytest.raises(ValueError, match="unknown codec 250"):
        unpack(b"\xfaabc")


def test_json_without_a_form_is_refused():
    with pytest.raises(TypeError):
        dump_json({"socket": object()})


def test_json_mappings_and_numpy_numbers_become_plain():
    from types import MappingProxyType

    value = MappingProxyType({"a": np.int64(3), "b": {"x"}})
    assert dump_json(value) == b'{"a":3,"b":["x"]}'


@pytest.mark.parametrize("size", [60, 900, 3_000, 9_000])
def test_text_that_the_dictionary_has_takes_next_to_nothing(size):
    dictionary = b"what is said again and again, with a number at its end: " * 20
    text = (b"7 and a number at its end: 343 " * size)[:size]
    packed = pack_against(text, dictionary)
    assert packed[0] == DICTIONARY
    assert len(packed) < 60
    assert unpack_against(packed, dictionary) == text
