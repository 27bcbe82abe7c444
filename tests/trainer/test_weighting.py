from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridle.trainer.batch.own_tokens import of_policy
from bridle.trainer.batch.prepare import prepare
from bridle.trainer.config import AdvantageConfig, GrpoConfig, LossConfig, PackingConfig
from bridle.trainer.credit.weighting import branch_token_weights
from bridle.trainer.learner.batches import pack_minibatch

branches = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), min_size=1)


def weights_of(rows, weighting, constant=1):
    sessions, tokens = zip(*rows, strict=True)
    return branch_token_weights(np.asarray(tokens), np.asarray(sessions), weighting, constant)


@given(branches)
def test_every_session_weighs_once_and_its_tokens_the_same_however_many_branches_it_has(rows):
    totals, weights = {}, {}
    for (session, tokens), weight in zip(rows, weights_of(rows, "session"), strict=True):
        if tokens:
            totals[session] = totals.get(session, 0.0) + tokens * weight
            weights.setdefault(session, set()).add(weight)
        else:
            assert weight == 0
    for session, total in totals.items():
        assert total == pytest.approx(1 / len(totals))
        assert len(weights[session]) == 1


@given(branches)
def test_token_mean_weighs_every_trained_token_alike_and_sums_to_one(rows):
    weights = weights_of(rows, "token")
    active = [(tokens, w) for (_, tokens), w in zip(rows, weights, strict=True) if w]
    if active:
        assert len({w for _, w in active}) == 1
        assert sum(tokens * w for tokens, w in active) == pytest.approx(1.0)


def test_splitting_a_session_into_branches_changes_no_token_weight():
    whole = weights_of([(0, 12), (1, 4)], "session")
    split = weights_of([(0, 9), (0, 3), (1, 4)], "session")
    assert split.tolist() == pytest.approx([whole[0], whole[0], whole[1]])


def test_the_constant_normaliser_does_not_depend_on_lengths():
    weights = weights_of([(0, 100), (1, 4)], "constant", constant=50)
    assert weights.tolist() == pytest.approx([1 / 100, 1 / 100])


def test_a_batch_with_nothing_to_train_weighs_nothing():
    assert weights_of([(0, 0), (1, 0)], "session").tolist() == [0, 0]


branch = st.lists(
    st.tuples(st.booleans(), st.integers(0, 5), st.sampled_from(["policy", "worker"])),
    min_size=1,
    max_size=12,
)
"""The sampled tokens of a branch.

Each token says whether the rules train it, its version, and the policy that sampled it.
"""


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(st.lists(branch, min_size=1, max_size=3), min_size=2, max_size=4),
    st.sampled_from(["tree", "flat"]),
    st.sampled_from([8, 1000]),
)
def test_whatever_is_masked_a_session_weighs_once_and_its_tokens_weigh_the_same(
    make_sample, make_episode, sessions, layout, max_tokens
):
    episodes = []
    for number, of in enumerate(sessions):
        total = sum(rule for each in of for rule, _, _ in each) or 1
        samples = []
        for place, rows in enumerate(of):
            rules, versions, policies = map(np.asarray, zip(*rows, strict=True))
            made = make_sample(
                [*range(len(rows)), place],
                np.flatnonzero(rules) + 1,
                session=f"s{number}",
                weight=float(rules.sum()) / total,
            )
            samples.append(
                replace(
                    made,
                    versions=np.concatenate([[-1], versions]),
                    calls=np.concatenate([[-1], np.where(policies == "worker", 1, 0)]).astype(
                        np.int32
                    ),
                    call_ids=("a", "b"),
                    policies=("policy", "worker"),
                )
            )
        episodes.append(make_episode(samples, float(number), session=f"s{number}"))
    config = GrpoConfig(
        max_staleness=2,
        advantages=AdvantageConfig(baseline="mean"),
        loss=LossConfig(weighting="session"),
        packing=PackingConfig(layout=layout, max_tokens=max_tokens),
    )
    own = [of_policy(episode, "worker") for episode in episodes]
    prepared = prepare(own, 5, config)
    assert prepared.account.balanced
    found: dict[int, list[float]] = {}
    for pack in pack_minibatch(prepared.items, config) if prepared.items else ():
        for sample, weight in zip(pack.pack.samples, pack.weights.tolist(), strict=True):
            found.setdefault(prepared.items[sample].session, []).append(weight)
    expected = Counter()
    for item in prepared.items:
        expected[item.session] += int(item.sample.mask.sum())
    assert {session: len(weights) for session, weights in found.items()} == expected
    for weights in found.values():
        assert sum(weights) == pytest.approx(1 / len(found), rel=1e-5)
        assert max(weights) == min(weights)
