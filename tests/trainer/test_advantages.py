import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.errors import UsageError
from bridle.reconstruct.samples.sample import Turn
from bridle.store.records import CallKind, CallStatus
from bridle.store.reward import Reward, RewardSource
from bridle.trainer.config import AdvantageConfig
from bridle.trainer.credit import ADVANTAGES, CreditGroup, estimated
from support.episodes import one_branch

rewards = st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=1, max_size=9).map(
    lambda values: np.asarray(values, dtype=np.float64)
)


def group_advantages(values, baseline, **config):
    """The credit of each session, which all of its tokens share."""
    episodes = [steps(str(number), ([1], None)) for number in range(len(values))]
    group = CreditGroup(episodes, values, AdvantageConfig(**config))
    credit = ADVANTAGES.get(baseline)(group)
    return np.asarray([parts[0][0] for parts in credit], np.float64)


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
    assert abs(found.sum()) < 1e-5
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
        assert found[i] == pytest.approx(expected, abs=1e-6)


@given(st.floats(-1e6, 1e6), st.integers(1, 6), baselines)
def test_a_group_without_variance_gives_exact_zeros(value, size, baseline):
    assert not group_advantages(np.full(size, value), baseline).any()


def test_the_population_s_deviation_can_be_chosen():
    values = np.asarray([1.0, 0.0, 0.0, 0.0])
    found = group_advantages(values, "grpo", deviation="population")
    np.testing.assert_allclose(found, (values - 0.25) / (values.std() + 1e-6), rtol=1e-6)


def steps(name, *calls, rewards=()):
    """A session of one branch whose calls are ``(prompt ids, role)``; each samples one token."""
    given = [
        Reward(name, "step", value, 1.0, call_id=call, source=RewardSource.VERIFIER)
        for call, value in rewards
    ]
    return one_branch(name, calls, given)


def credit_of(baseline, episodes, values, **options):
    config = AdvantageConfig(baseline, options={baseline: options})
    found = estimated(CreditGroup(episodes, np.asarray(values, np.float64), config))
    return [
        part[sample.mask].tolist()
        for episode, parts in zip(episodes, found, strict=True)
        for sample, part in zip(episode.samples, parts, strict=True)
    ]


def norm(values):
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return [(value - mean) / (math.sqrt(variance) + 1e-6) for value in values]


def test_a_role_is_compared_over_its_own_steps_and_a_lone_one_has_no_baseline():
    episodes = [
        steps("a", ([1], None), ([2], "search"), ([3], "search")),
        steps("b", ([1], None), ([2], "search")),
        steps("c", ([1], None), ([4], "critic")),
    ]
    found = credit_of("per_role", episodes, [1.0, 0.0, 0.5])
    own, search = norm([1.0, 0.0, 0.5]), norm([1.0, 1.0, 0.0])
    assert found[0] == pytest.approx([own[0], search[0], search[1]], abs=1e-6)
    assert found[1] == pytest.approx([own[1], search[2]], abs=1e-6)
    assert found[2][0] == pytest.approx(own[2], abs=1e-6)
    assert math.isnan(found[2][1])


def test_gigpo_adds_the_advantage_among_steps_with_the_same_prompt():
    episodes = [
        steps("a", ([1], None), ([2], None), rewards=[("a0", 0.5)]),
        steps("b", ([1], None), ([3], None)),
        steps("c", ([1], None)),
    ]
    found = credit_of("gigpo", episodes, [1.0, 0.0, 2.0], discount=0.5, step_weight=2.0)
    whole = norm([0.5 + 1.0, 0.0, 2.0])
    first = norm([0.5 + 0.5 * 1.0, 0.0, 2.0])
    # What stands before the second calls differs, so that they are compared with nothing.
    assert found[0] == pytest.approx([whole[0] + 2 * first[0], whole[0]], abs=1e-6)
    assert found[1] == pytest.approx([whole[1] + 2 * first[1], whole[1]], abs=1e-6)
    assert found[2] == pytest.approx([whole[2] + 2 * first[2]], abs=1e-6)


def test_turn_returns_discount_what_came_after():
    episodes = [
        steps("a", ([1], None), ([2], None), rewards=[("a0", 1.0), ("a1", 0.25)]),
        steps("b", ([1], None)),
    ]
    found = credit_of("turn_returns", episodes, [2.0, 0.5], discount=0.9)
    expected = norm([1.0 + 0.9 * (0.25 + 2.0), 0.25 + 2.0, 0.5])
    assert [*found[0], *found[1]] == pytest.approx(expected, abs=1e-6)


def test_returns_are_discounted_over_calls_that_are_branches_of_their_own():
    apart = [steps(name, ([number], None)) for number, name in enumerate("xyz")]
    session = replace(
        apart[0],
        samples=tuple(each.samples[0] for each in apart),
        turns=tuple(Turn(name + "0", CallKind.MAIN, CallStatus.COMPLETE) for name in "yxz"),
    )
    found = credit_of("turn_returns", [session, steps("b", ([1], None))], [2.0, 0.5], discount=0.9)
    expected = norm([0.9 * 2.0, 0.81 * 2.0, 2.0, 0.5])
    assert [value for credit in found for value in credit] == pytest.approx(expected, abs=1e-6)


def test_gated_counts_rewards_of_steps_behind_the_gate_only():
    episodes = [
        steps("a", ([1], None), rewards=[("a0", 0.5)]),
        steps("b", ([1], None), rewards=[("b0", 9.0)]),
        steps("c", ([1], None)),
    ]
    found = credit_of("gated", episodes, [1.0, 0.0, 1.0], gate=1.0)
    assert [one[0] for one in found] == pytest.approx(norm([1.5, 0.0, 1.0]), abs=1e-6)


def test_spiral_compares_each_role_with_what_it_got_before():
    """Two games of a first and a second player, by the paper's recursion in float64."""
    games = [
        steps(
            "a",
            ([1], "first"),
            ([2], "second"),
            ([3], "first"),
            rewards=[("a0", 1.0), ("a1", -1.0)],
        ),
        steps("b", ([1], "first"), ([4], "second"), rewards=[("b0", -1.0), ("b1", 1.0)]),
    ]
    memory: dict[str, float] = {}
    decay = 0.9
    config = AdvantageConfig("spiral", options={"spiral": {"decay": decay}})
    group = CreditGroup(games, np.zeros(2), config, memory)
    found = [
        part[sample.mask].tolist()
        for episode, parts in zip(games, estimated(group), strict=True)
        for sample, part in zip(episode.samples, parts, strict=True)
    ]
    baseline = {"first": 0.0, "second": 0.0}
    expected = []
    for rewards in ({"first": 1.0, "second": -1.0}, {"first": -1.0, "second": 1.0}):
        for role, reward in rewards.items():
            baseline[role] = decay * baseline[role] + (1 - decay) * reward
        expected.append({role: rewards[role] - baseline[role] for role in rewards})
    assert found[0] == pytest.approx(
        [expected[0]["first"], expected[0]["second"], expected[0]["first"]], abs=1e-6
    )
    assert found[1] == pytest.approx([expected[1]["first"], expected[1]["second"]], abs=1e-6)
    assert memory == pytest.approx({f"|{role}": value for role, value in baseline.items()})


def test_spiral_takes_the_sessions_reward_where_a_roles_calls_have_none():
    memory = {"|": 0.5}
    group = CreditGroup([steps("a", ([1], None))], np.ones(1), AdvantageConfig(), memory)
    ((part,),) = ADVANTAGES.get("spiral")(group)
    assert part[-1] == pytest.approx(1 - (0.95 * 0.5 + 0.05), abs=1e-6)


def test_lite_ppo_divides_by_the_deviation_of_the_whole_step():
    def session(name, value):
        given = (Reward(name, "reward", value, 0.0, source=RewardSource.VERIFIER),)
        return one_branch(name, [([1], None)], given)

    own, others = [1.0, 0.0, 0.0], [3.0, 5.0]
    step = [session(str(number), value) for number, value in enumerate([*own, *others])]
    group = CreditGroup(step[:3], np.asarray(own), AdvantageConfig(), batch=step)
    found = [float(parts[0][0]) for parts in ADVANTAGES.get("lite_ppo")(group)]
    mean = sum([*own, *others]) / 5
    deviation = math.sqrt(sum((value - mean) ** 2 for value in [*own, *others]) / 4)
    expected = [(value - sum(own) / 3) / (deviation + 1e-6) for value in own]
    assert found == pytest.approx(expected, rel=1e-6)


@given(st.integers(0, 2**32 - 1))
def test_aem_modulates_a_base_by_the_entropy_of_replies(seed):
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 4, 4).tolist()
    episodes = []
    for number, count in enumerate(counts):
        plain = steps(str(number), *[([call], None) for call in range(count)])
        (sample,) = plain.samples
        logprobs = -rng.exponential(1.0, len(sample.mask)).astype(np.float32)
        episodes.append(replace(plain, samples=(replace(sample, logprobs=logprobs),)))
    values = rng.integers(0, 3, 4) / 2
    found = credit_of("aem", episodes, values, base="mean", sharpness=0.7)
    surprise = [
        [-float(one) for one in each.samples[0].logprobs[each.samples[0].mask]] for each in episodes
    ]
    every = [one for own in surprise for one in own]
    low, high = min(every), max(every)
    weights = [[math.exp(-0.7 * (one - low) / (high - low + 1e-6)) for one in o] for o in surprise]
    mean = math.fsum(one for own in weights for one in own) / len(every)
    centre = math.fsum(values) / len(values)
    for own, credit, value in zip(weights, found, values, strict=True):
        expected = [(value - centre) * one / mean for one in own]
        assert credit == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("base", ["aem", "gigpo"])
def test_aem_refuses_a_base_of_single_steps(base):
    with pytest.raises(UsageError, match=r"options\.aem\.base"):
        credit_of("aem", [steps("a", ([1], None))], [1.0], base=base)


@given(st.integers(0, 2**32 - 1))
def test_igpo_compares_the_gain_of_each_turn_and_discounts_what_follows(seed):
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 5, 3).tolist()
    answers = ["Oslo", None, "Bern"]
    episodes = [
        replace(
            steps(str(n), *[([10 * n + call], None) for call in range(count)]),
            payload={} if answer is None else {"answer": answer},
        )
        for n, (count, answer) in enumerate(zip(counts, answers, strict=True))
    ]
    logprobs = {}
    lengths = {"Oslo": 2, "Bern": 3}

    def likelihoods(asked):
        for pair in asked:
            logprobs[pair] = -rng.exponential(1.0, lengths[pair[1]]).astype(np.float32)
        return [logprobs[pair] for pair in asked]

    values = rng.integers(0, 3, 3).astype(np.float64)
    config = AdvantageConfig("igpo", options={"igpo": {"discount": 0.8}})
    group = CreditGroup(episodes, values, config, likelihoods=likelihoods)
    credit = estimated(group)
    rewards = []
    for number, (count, answer) in enumerate(zip(counts, answers, strict=True)):
        # The prompt of a later call has the tokens of the earlier ones before its own.
        prompts = [
            np.asarray(
                [t for c in range(call) for t in (10 * number + c, 90 + c)] + [10 * number + call],
                np.uint32,
            ).tobytes()
            for call in range(count)
        ]
        likely = [0.0] * count
        if answer is not None and count > 1:
            likely = [
                math.exp(math.fsum(s) / len(s)) for s in (logprobs[p, answer] for p in prompts)
            ]
        gains = [likely[at + 1] - likely[at] for at in range(count - 1)]
        rewards.append([*gains, values[number]])
    every = [one for own in rewards for one in own]
    mean = math.fsum(every) / len(every)
    deviation = math.sqrt(math.fsum((one - mean) ** 2 for one in every) / max(len(every) - 1, 1))
    for own, parts, episode in zip(rewards, credit, episodes, strict=True):
        (sample,) = episode.samples
        expected = [
            math.fsum(
                0.8 ** (later - at) * (own[later] - mean) / (deviation + 1e-6)
                for later in range(at, len(own))
            )
            for at in range(len(own))
        ]
        assert parts[0][sample.mask].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_an_estimator_that_scores_texts_needs_a_policy():
    session = replace(steps("a", ([1], None), ([2], None)), payload={"answer": "x"})
    with pytest.raises(UsageError, match="bridle train"):
        credit_of("igpo", [session], [1.0])
