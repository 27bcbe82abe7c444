"""The trainer's logprob and entropy of each trained token, as an update keeps them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from bridle.store.reading.conversation import ReplyId
from bridle.store.trained import SpanScores
from bridle.trainer.batch.packing import make_packs
from bridle.trainer.batch.prepare import TrainItem
from bridle.trainer.config import GrpoConfig, OptimizerConfig, PackingConfig
from bridle.trainer.learner.learner import Learner
from bridle.trainer.learner.scores import merged_scores
from bridle.trainer.policy.model import load_policy, score_pack

CONFIG = GrpoConfig(optimizer=OptimizerConfig(learning_rate=0.01, warmup_steps=0))


@pytest.fixture
def samples(make_sample):
    """Two branches of one session that share a reply, of which each trains a part; and another.

    The second reply on the second branch is the second choice of its call.
    """
    first = replace(
        make_sample([1, 2, 3, 4, 5, 6], [2, 3]),
        calls=np.asarray([-1, -1, 0, 0, 0, -1], np.int32),
        call_ids=("a",),
    )
    second = replace(
        make_sample([1, 2, 3, 4, 5, 9, 10, 11], [4, 6, 7]),
        calls=np.asarray([-1, -1, 0, 0, 0, -1, 1, 1], np.int32),
        call_ids=("a", "b"),
        choices=(0, 1),
    )
    other = make_sample([7, 8, 9, 10], [2, 3], session="t")
    return [first, second, other]


def items_of(samples):
    return [
        TrainItem(sample, number, number, np.full(len(sample.token_ids), credit, np.float32))
        for number, (sample, credit) in enumerate(zip(samples, (1.0, -1.0, 0.5), strict=True))
    ]


def wanted(policy_directory, samples):
    """The scores of each sample's trained tokens by the policy before the step, by offset."""
    model, found = load_policy(policy_directory), []
    for sample in samples:
        (pack,) = make_packs([sample], PackingConfig(layout="padded"))
        with torch.no_grad():
            scores = score_pack(model, pack)
        pairs = zip(scores.logprobs.tolist(), scores.entropies.tolist(), strict=True)
        found.append(dict(zip(pack.offsets.tolist(), pairs, strict=True)))
    return found


@pytest.mark.parametrize("layout", ["tree", "flat", "padded"])
@pytest.mark.parametrize("updates", [{}, {"minibatches": 3}, {"epochs": 2}], ids=str)
def test_scores_are_those_of_the_policy_before_the_step(policy_directory, samples, layout, updates):
    config = replace(CONFIG, packing=PackingConfig(layout=layout), **updates)
    learner = Learner(load_policy(policy_directory), config)
    stats = learner.update(items_of(samples), config, step=0, version=4, learning_rate=0.01)
    found = merged_scores(stats.scores)
    first, second, other = wanted(policy_directory, samples)
    places = {
        ReplyId("a", 0): {0: first[2], 1: first[3], 2: second[4]},
        ReplyId("b", 1): {0: second[6], 1: second[7]},
        ReplyId("t-call", 0): {0: other[2], 1: other[3]},
    }
    assert found.keys() == places.keys()
    for reply, scores in places.items():
        assert found[reply].version == 4
        pairs = np.stack([found[reply].logprobs, found[reply].entropies], axis=1)
        assert pairs == pytest.approx(np.asarray(list(scores.values())), abs=2e-5)


def test_tokens_between_trained_ones_have_no_score(policy_directory, make_sample):
    sample = replace(
        make_sample([1, 2, 3, 4, 5], [1, 3]), calls=np.asarray([-1, 0, 0, 0, 0], np.int32)
    )
    learner = Learner(load_policy(policy_directory), CONFIG)
    items = [TrainItem(sample, 0, 0, np.ones(5, np.float32))]
    (scores,) = learner.update(items, CONFIG, step=0, version=1, learning_rate=0.01).scores
    assert np.isnan(scores.logprobs).tolist() == [False, True, False]


def test_scores_are_a_setting(policy_directory, samples):
    config = replace(CONFIG, token_scores=False)
    learner = Learner(load_policy(policy_directory), config)
    stats = learner.update(items_of(samples), config, step=0, version=4, learning_rate=0.01)
    assert stats.scores == ()


def test_parts_of_a_reply_are_merged_in_either_order():
    nan = np.nan

    def part(*values):
        array = np.asarray(values, np.float32)
        return SpanScores("c", 0, 1, array, -array)

    for parts in ((part(1, nan), part(nan, 2, 3)), (part(nan, 2, 3), part(1, nan))):
        (whole,) = merged_scores(parts).values()
        assert whole.logprobs.tolist() == [1, 2, 3]
        assert whole.entropies.tolist() == [-1, -2, -3]
