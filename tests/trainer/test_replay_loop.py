"""Earlier successes of a run, replayed in a loop on a bandit."""

import dataclasses

import pytest
import torch

from bridle.trainer.collection.replay import ReplayBuffer
from bridle.trainer.config import GrpoConfig, OptimizerConfig, PackingConfig, ReplayConfig

REPLAYED = GrpoConfig(
    steps=4,
    minibatches=2,
    optimizer=OptimizerConfig(learning_rate=1e-2),
    packing=PackingConfig(max_tokens=64, block_tokens=16),
    replay=ReplayConfig(share=0.5, warmup_steps=0),
)


def run(loop):
    reports = []
    loop.run(reports.append)
    return reports


def weights(loop):
    return [parameter.detach().clone() for parameter in loop.learner.model.parameters()]


@pytest.fixture
def replaying(bandit_loop):
    """A loop on a bandit whose sessions are recorded, by id, in a store that outlives it."""
    recorded = {}

    def make(config=REPLAYED, **arguments):
        loop, bandit = bandit_loop(config, load=lambda name: recorded[name], **arguments)
        original = bandit.make_episode

        def record(samples, reward, *, session, **fields):
            recorded[session] = original(samples, reward, session=session, **fields)
            return recorded[session]

        bandit.make_episode = record
        return loop, bandit

    return make


def fresh(report):
    """Return a step's metrics of its own sessions, before the update."""
    rooms = ("reward/", "sessions/", "groups/", "tokens/", "staleness/")
    return {name: value for name, value in report.metrics().items() if name.startswith(rooms)}


def test_replayed_sessions_train_beside_a_steps_own_and_are_counted_apart(replaying, tmp_path):
    still = dataclasses.replace(
        REPLAYED, minibatches=1, optimizer=OptimizerConfig(learning_rate=0.0)
    )
    torch.manual_seed(3)
    loop, bandit = replaying(still)
    reports = run(loop)
    torch.manual_seed(3)
    without, _ = replaying(
        dataclasses.replace(still, replay=ReplayConfig()), directory=tmp_path / "without"
    )
    assert [fresh(report) for report in reports] == [fresh(report) for report in run(without)]
    first, *later = [report.metrics() for report in reports]
    assert (first["replay/sessions"], first["replay/buffer"]) == (0, 0)
    for step, (report, metrics) in enumerate(zip(reports[1:], later, strict=True), start=1):
        assert metrics["replay/sessions"] == min(bandit.sessions, metrics["replay/buffer"])
        assert metrics["replay/tokens"] == bandit.sampled * metrics["replay/sessions"]
        assert 0 < metrics["replay/staleness"] <= step
        assert report.update.loss["tokens"] == metrics["tokens/trained"] + metrics["replay/tokens"]
        # On policy, the step's own tokens are those of the version in training.
        assert report.update.gap.tokens == metrics["tokens/trained"]


def test_a_step_whose_own_sessions_teach_nothing_learns_from_replayed_ones(replaying):
    loop, bandit = replaying(dataclasses.replace(REPLAYED, steps=2))
    original = bandit.make_episode

    def collect_successes_once(samples, reward, *, session, **fields):
        known = reward if session.startswith("0-") else 0.0
        return original(samples, known, session=session, **fields)

    bandit.make_episode = collect_successes_once
    _, report = run(loop)
    assert report.prepared.items == ()
    assert report.version == 2
    assert report.update.loss["tokens"] == report.metrics()["replay/tokens"] > 0


def test_replay_that_is_off_or_finds_nothing_changes_no_bit(replaying, tmp_path):
    trained = {}
    for name, replay in {
        "off": ReplayConfig(warmup_steps=0),
        "empty": ReplayConfig(share=1.0, warmup_steps=0, max_staleness=0),
    }.items():
        torch.manual_seed(3)
        config = dataclasses.replace(REPLAYED, steps=2, replay=replay)
        loop, _ = replaying(config, directory=tmp_path / name)
        metrics = run(loop)[-1].metrics()
        trained[name] = weights(loop)
        shown = {metric: value for metric, value in metrics.items() if "replay/" in metric}
        if name == "off":
            assert (shown, loop.replay_buffer) == ({}, ReplayBuffer())
        else:
            assert set(shown.values()) == {0.0}
    torch.testing.assert_close(trained["off"], trained["empty"], rtol=0, atol=0)


def test_a_resumed_run_replays_what_it_would_have_replayed(replaying, tmp_path):
    torch.manual_seed(3)
    straight, _ = replaying(directory=tmp_path / "straight")
    expected = [report.metrics()["replay/buffer"] for report in run(straight)]
    assert expected[-1] > 0
    torch.manual_seed(3)
    first, bandit = replaying()
    group = bandit.group

    def die_in_the_third_step(name, *arguments):
        if name == "2-1":
            raise KeyboardInterrupt
        return group(name, *arguments)

    bandit.group = die_in_the_third_step
    with pytest.raises(KeyboardInterrupt):
        run(first)
    torch.manual_seed(55)
    second, _ = replaying()
    second.resume()
    assert second.replay_buffer == first.replay_buffer != ReplayBuffer()
    assert [report.metrics()["replay/buffer"] for report in run(second)] == expected[2:]
    assert second.replay_buffer == straight.replay_buffer
    torch.testing.assert_close(weights(straight), weights(second), rtol=0, atol=0)


def test_a_new_number_for_the_weights_makes_no_success_older(replaying):
    loop, _ = replaying(dataclasses.replace(REPLAYED, steps=2))
    run(loop)
    before = [loop.version - success.version for success in loop.replay_buffer.successes]
    loop.renumber(9)
    assert [loop.version - each.version for each in loop.replay_buffer.successes] == before


def test_replay_without_a_way_to_load_sessions_is_an_error(bandit_loop):
    with pytest.raises(ValueError, match="replay"):
        bandit_loop(REPLAYED)


def test_the_reward_rises_with_replay(replaying):
    loop, _ = replaying(dataclasses.replace(REPLAYED, steps=12))
    reports = run(loop)
    assert reports[0].reward_mean < 0.75
    assert reports[-1].reward_mean > 0.9
