"""Several policies in one run: each is trained on its own tokens of the same sessions."""

import dataclasses

import numpy as np
import pytest
import torch

from bridle.engine.contract.tokenizer import Tokenizer
from bridle.store.records import DEFAULT_POLICY, PolicyRecord
from bridle.store.reward import Reward, RewardSource
from bridle.trainer.batch.fates import merged
from bridle.trainer.batch.filters import account_of
from bridle.trainer.batch.own_tokens import of_policy
from bridle.trainer.config import (
    AdvantageConfig,
    CheckpointConfig,
    GrpoConfig,
    OptimizerConfig,
    PackingConfig,
    ReplayConfig,
)
from bridle.trainer.learner.checkpoint import checkpoints
from bridle.trainer.learner.learner import Learner
from bridle.trainer.learner.trained import TrainedPolicy
from bridle.trainer.loop import GrpoLoop
from bridle.trainer.policy.model import ON_CPU, trainable_policy
from support.episodes import one_branch

WORKER = "worker"
CONFIG = GrpoConfig(
    steps=12,
    optimizer=OptimizerConfig(learning_rate=1e-2),
    packing=PackingConfig(max_tokens=128, block_tokens=16),
)


def test_texts_are_scored_after_prompts_by_the_policy_in_training(chat_directory, tmp_path):
    learner = Learner(trainable_policy(chat_directory, ON_CPU, CONFIG.lora), CONFIG)
    policy = TrainedPolicy(learner, tmp_path, tokenizer_from=chat_directory)
    prompts = [np.asarray(ids, np.uint32) for ids in ([5, 6, 7], [8])]
    found = policy.likelihoods([(one.tobytes(), "Norway? 12") for one in prompts])
    text = Tokenizer(chat_directory).encode("Norway? 12")
    assert len(text) > 1
    for prompt, scores in zip(prompts, found, strict=True):
        ids = torch.tensor([[*prompt.tolist(), *text]])
        with torch.no_grad():
            logprobs = learner.model(input_ids=ids).logits[0].log_softmax(-1)
        ours = [logprobs[len(prompt) - 1 + at, one].item() for at, one in enumerate(text)]
        assert scores.tolist() == pytest.approx(ours, abs=1e-4)


def test_igpo_scores_answers_with_the_policy_in_training(chat_directory, tmp_path):
    learner = Learner(trainable_policy(chat_directory, ON_CPU, CONFIG.lora), CONFIG)
    policy = TrainedPolicy(learner, tmp_path, tokenizer_from=chat_directory)
    config = dataclasses.replace(CONFIG, advantages=AdvantageConfig("igpo"))
    episodes = []
    for name, first in (("a", 5), ("b", 9)):
        given = (Reward(name, "reward", 1.0, 0.0, source=RewardSource.VERIFIER),)
        one = one_branch(name, [([first], None), ([7], None)], given, "completed")
        episodes.append(dataclasses.replace(one, payload={"answer": "Oslo"}))
    prepared = policy.prepared(episodes, 0, config, None)
    assert len(prepared.items) == 2, "equal rewards, and turns of their own gain"
    rewards = []
    for first in (5, 9):
        prompts = [np.asarray(ids, np.uint32).tobytes() for ids in ([first], [first, 90, 7])]
        before, after = policy.likelihoods([(one, "Oslo") for one in prompts])
        rewards.append([np.exp(after.mean()) - np.exp(before.mean()), 1.0])
    normed = (np.asarray(rewards) - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-6)
    for item, (turn, last) in zip(prepared.items, normed, strict=True):
        assert item.credit[item.sample.mask].tolist() == pytest.approx(
            [turn + last, last], abs=1e-4
        )


class TwoBandits:
    """Sessions in which each policy has a conversation; the reward is half of each one's."""

    def __init__(self, bandits):
        self.bandits = bandits
        self.collected = []

    def __call__(self, step, version):
        by_policy = [
            [
                (name, episode.samples[0], episode.rewards[0].value)
                for episode in bandit(step, version)
            ]
            for name, bandit in self.bandits.items()
        ]
        make = next(iter(self.bandits.values())).make_episode
        episodes = []
        for parts in zip(*by_policy, strict=True):
            session = parts[0][1].session_id
            samples = [
                dataclasses.replace(sample, policies=(name,), roles=(name,), role=name, weight=0.5)
                for name, sample, _ in parts
            ]
            reward = float(np.mean([value for *_, value in parts]))
            group = session.rpartition("-")[0]
            episodes.append(make(samples, reward, session=session, group=group))
        self.collected.append(episodes)
        return episodes


@pytest.fixture
def team(policy_directory, make_bandit, tmp_path):
    """Makes a loop of two policies that begin alike, and what they collect."""

    def make(config=CONFIG, directory=tmp_path / "run", publish=lambda name: None):
        models = {
            name: trainable_policy(policy_directory, ON_CPU, CONFIG.lora)
            for name in (DEFAULT_POLICY, WORKER)
        }
        bandits = TwoBandits({name: make_bandit(model) for name, model in models.items()})
        first, worker = (Learner(model, config) for model in models.values())
        policies = [
            TrainedPolicy(first, directory / "first", publish(DEFAULT_POLICY)),
            TrainedPolicy(worker, directory / WORKER, publish(WORKER), name=WORKER),
        ]
        return GrpoLoop(config, policies, bandits), bandits

    return make


def run(loop):
    reports = []
    loop.run(reports.append)
    return reports


def weights(loop):
    return [each.learner.tensors() for each in loop.policies]


def assert_equal_weights(first, second):
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("baseline", ["grpo", "per_role"])
@pytest.mark.sampled(2)
def test_both_learn_and_tell_apart_what_they_trained(team, baseline):
    config = dataclasses.replace(CONFIG, steps=24, advantages=AdvantageConfig(baseline))
    loop, bandits = team(config)
    reports = run(loop)
    assert reports[0].reward_mean < 0.75
    assert reports[-1].reward_mean > 0.9
    metrics = reports[0].metrics()
    sessions = len(bandits.collected[0])
    assert metrics["tokens/captured"] == metrics["worker/tokens/captured"] == 4 * sessions
    assert metrics["tokens/masked/other_policy"] == 2 * sessions
    assert metrics["worker/update/loss"] != metrics["update/loss"]
    assert "worker/reward/mean" not in metrics


def test_each_has_the_weights_of_a_run_that_trains_it_alone(team, policy_directory, tmp_path):
    config = dataclasses.replace(CONFIG, steps=3, minibatches=2)
    loop, bandits = team(config)
    run(loop)
    for number, name in enumerate((DEFAULT_POLICY, WORKER)):
        learner = Learner(trainable_policy(policy_directory, ON_CPU, CONFIG.lora), config)
        alone = GrpoLoop(
            config,
            [TrainedPolicy(learner, tmp_path / name, name=name)],
            lambda step, version: bandits.collected[step],
        )
        run(alone)
        assert_equal_weights(weights(loop)[number], learner.tensors())


def test_a_step_that_trains_one_publishes_both(team):
    published = []

    def publish(name):
        def to_engine(policy, version):
            published.append((name, version))
            return PolicyRecord("run", version, 0.0, name=name)

        return to_engine

    loop, bandits = team(dataclasses.replace(CONFIG, steps=1), publish=publish)
    worker = bandits.bandits[WORKER]
    original = worker.make_sample
    worker.make_sample = lambda ids, trained, **fields: original(
        ids, [], **fields | {"logprobs": []}
    )
    (report,) = run(loop)
    assert published == [(DEFAULT_POLICY, 1), (WORKER, 1)]
    assert report.update is not None
    assert report.others[WORKER].update is None
    assert report.others[WORKER].policy.name == WORKER


def test_a_run_stopped_between_two_checkpoints_goes_on_from_what_both_have(team, tmp_path):
    config = dataclasses.replace(CONFIG, steps=4, checkpoints=CheckpointConfig(keep=1))
    torch.manual_seed(3)
    straight, _ = team(config, tmp_path / "straight")
    run(straight)

    torch.manual_seed(3)
    stopped, _ = team(config)
    first = stopped.policies[0]
    save = first.learner.save_checkpoint

    def die_at_the_third(directory, progress, **fields):
        if progress.step == 3:
            raise KeyboardInterrupt
        save(directory, progress, **fields)

    first.learner.save_checkpoint = die_at_the_third
    with pytest.raises(KeyboardInterrupt):
        run(stopped)
    steps = [checkpoints(each.directory)[-1].name[-1] for each in stopped.policies]
    assert steps == ["2", "3"]
    torch.manual_seed(55)
    resumed, _ = team(config)
    assert resumed.resume().step == 2
    run(resumed)
    assert_equal_weights(weights(straight), weights(resumed))


def test_running_baselines_are_each_policys_own(team):
    config = dataclasses.replace(CONFIG, steps=2, advantages=AdvantageConfig("spiral"))
    loop, _ = team(config)
    run(loop)
    resumed, _ = team(config)
    resumed.resume()
    kept = [each.memory for each in resumed.policies]
    assert kept == [each.memory for each in loop.policies]
    assert all(kept)


def test_success_replay_is_for_one_policy(team):
    replayed = dataclasses.replace(CONFIG, replay=ReplayConfig(share=0.5))
    with pytest.raises(ValueError, match="replay"):
        team(replayed)


def test_what_others_sampled_is_masked_with_that_reason(make_sample, make_episode):
    def sample(name, calls, policies, weight):
        made = make_sample([1, 2, 3, 4], [1, 2, 3], weight=weight)
        calls = np.asarray([-1, *calls], np.int32)
        ids = tuple(f"{name}{n}" for n in range(len(policies)))
        return dataclasses.replace(made, calls=calls, call_ids=ids, policies=policies)

    episode = make_episode(
        [
            sample("a", [0, 0, 1], (DEFAULT_POLICY, WORKER), 0.25),
            sample("b", [0, 0, 0], (WORKER,), 0.5),
            sample("c", [0, 0, 0], (DEFAULT_POLICY,), 0.25),
        ],
        1.0,
    )
    shares = [account_of(of_policy(episode, name), None) for name in (DEFAULT_POLICY, WORKER)]
    for accounts, others in ((shares, 0), (shares[:1], 4)):
        whole = merged(episode, accounts)
        assert (whole.trained, whole.masked["other_policy"]) == (9 - others, others)
        assert whole.balanced, "a token counts once, as its own policy has it"
    own = of_policy(episode, WORKER)
    assert [each.mask.tolist() for each in own.samples] == [
        [False, False, False, True],
        [False, True, True, True],
        [False] * 4,
    ]
    account = account_of(own, None)
    assert (account.trained, account.masked) == (4, {"other_policy": 5})
    assert account.balanced
    assert of_policy(own, WORKER) is own
    nobody = of_policy(episode, "critic")
    assert not any(each.mask.any() for each in nobody.samples)
