import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.trainer.credit.weighting import branch_token_weights

branches = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(0, 4).map(float)), min_size=1
)


def weights_of(rows, weighting, constant=1):
    sessions, tokens, shares = zip(*rows, strict=True)
    return branch_token_weights(
        np.asarray(tokens), np.asarray(shares), np.asarray(sessions), weighting, constant
    )


@given(branches)
def test_every_session_weighs_once_however_many_branches_it_has(rows):
    weights = weights_of(rows, "session")
    totals = {}
    for (session, tokens, share), weight in zip(rows, weights, strict=True):
        if tokens and share:
            totals[session] = totals.get(session, 0.0) + tokens * weight
        else:
            assert weight == 0
    for total in totals.values():
        assert total == pytest.approx(1 / len(totals))


@given(branches)
def test_token_mean_weighs_every_trained_token_alike_and_sums_to_one(rows):
    weights = weights_of(rows, "token")
    active = [(tokens, w) for (_, tokens, share), w in zip(rows, weights, strict=True) if w]
    if active:
        assert len({w for _, w in active}) == 1
        assert sum(tokens * w for tokens, w in active) == pytest.approx(1.0)


def test_splitting_a_session_into_branches_by_tokens_changes_no_token_weight():
    whole = weights_of([(0, 12, 1.0), (1, 4, 1.0)], "session")
    split = weights_of([(0, 9, 0.75), (0, 3, 0.25), (1, 4, 1.0)], "session")
    assert split.tolist() == pytest.approx([whole[0], whole[0], whole[1]])


def test_the_constant_normaliser_does_not_depend_on_lengths():
    weights = weights_of([(0, 100, 1.0), (1, 4, 1.0)], "constant", constant=50)
    assert weights.tolist() == pytest.approx([1 / 100, 1 / 100])


def test_a_batch_with_nothing_to_train_weighs_nothing():
    assert weights_of([(0, 0, 1.0), (1, 5, 0.0)], "session").tolist() == [0, 0]
