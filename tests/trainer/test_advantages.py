import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.trainer.credit.advantages import advantages_by_group, group_advantages

rewards = st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=1, max_size=9).map(
    lambda values: np.asarray(values, dtype=np.float64)
)
baselines = st.sampled_from(["grpo", "leave_one_out", "mean"])


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        # mean 0.25, sample standard deviation 0.5
        ("grpo", [1.5, -0.5, -0.5, -0.5]),
        ("leave_one_out", [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("mean", [0.75, -0.25, -0.25, -0.25]),
    ],
)
def test_advantages_equal_those_computed_by_hand(baseline, expected):
    found = group_advantages(np.asarray([1.0, 0.0, 0.0, 0.0]), baseline)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@given(rewards, baselines)
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order_of_rewards(values, baseline):
    found = group_advantages(values, baseline)
    assert abs(found.sum()) < 1e-9
    for i in range(len(values)):
        for j in range(len(values)):
            if values[i] < values[j]:
                assert found[i] < found[j]


@given(rewards, st.integers(-40, 40), st.integers(1, 20))
def test_std_normalised_advantages_do_not_depend_on_the_reward_scale(values, shift, scale):
    plain = group_advantages(values, "grpo")
    moved = group_advantages(values * scale + shift, "grpo")
    np.testing.assert_allclose(plain, moved, rtol=1e-4, atol=1e-7)


@given(rewards)
def test_leave_one_out_compares_with_the_mean_of_the_others(values):
    found = group_advantages(values, "leave_one_out")
    for i in range(len(values)):
        others = np.delete(values, i)
        expected = values[i] - others.mean() if len(others) else 0.0
        assert found[i] == pytest.approx(expected, abs=1e-9)


@given(st.floats(-1e6, 1e6), st.integers(1, 6), baselines)
def test_a_group_without_variance_gives_exact_zeros(value, size, baseline):
    assert not group_advantages(np.full(size, value), baseline).any()


def test_each_session_is_compared_within_its_own_group():
    found = advantages_by_group([1.0, 5.0, 0.0, 7.0], ["a", "b", "a", "b"], "mean")
    np.testing.assert_allclose(found, [0.5, -1.0, -0.5, 1.0])
