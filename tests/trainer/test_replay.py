"""Test which successes are kept, how they count later, and that they change nothing else."""

import dataclasses
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.store.errors import NotFound
from bridle.trainer.batch.prepare import prepare
from bridle.trainer.collection.replay import ReplayBuffer, Success, coefficient
from bridle.trainer.config import AdvantageConfig, GrpoConfig, ReplayConfig

REPLAY = ReplayConfig(share=0.5, warmup_steps=0)
CONFIG = GrpoConfig(advantages=AdvantageConfig(baseline="mean"), replay=REPLAY)


@pytest.fixture
def session(make_sample, make_episode):
    def make(name, reward, *, version=5, **fields):
        versions = [version] if isinstance(version, int) else version
        samples = [
            make_sample([1, 2, 3, 4], (2, 3), session=name, version=each, weight=1 / len(versions))
            for each in versions
        ]
        return make_episode(samples, reward, session=name, **fields)

    return make


def names(buffer):
    return [success.session_id for success in buffer.successes]


def full(*sessions, baselines=(0.0,)):
    return ReplayBuffer(tuple(Success(*each) for each in sessions), baselines)


# -- what is kept ----------------------------------------------------------------------------------


def test_what_was_trained_with_a_positive_advantage_is_kept(session):
    episodes = [
        session("good", 1.0),
        session("bad", 0.0),
        session("late", 1.0, outcome="timeout"),
        session("stale", 1.0, version=2),
        session("unrewarded", None),
        session("easy", 1.0, group="equal"),
        session("easy too", 1.0, group="equal"),
    ]
    buffer = ReplayBuffer().after(prepare(episodes, 5, CONFIG), REPLAY)
    assert buffer.successes == (Success("good", 1.0, 5),)
    assert buffer.baselines == (0.75, 1.0), "groups that train nothing say how good the policy is"


def test_with_credit_for_steps_the_mean_over_trained_tokens_decides(session, monkeypatch):
    episodes = [session("a", 1.0, version=[5, 5]), session("b", 0.0, version=[5, 5])]
    credits = [[[9.0, 9.0, -1.0, -1.0], [0.0, 0.0, 1.5, 0.0]], [[0, 0, 2.0, 0], [0, 0, 0, -1.0]]]
    monkeypatch.setattr(
        "bridle.trainer.batch.prepare.estimated",
        lambda _group: [[np.asarray(c, np.float32) for c in own] for own in credits],
    )
    assert names(ReplayBuffer().after(prepare(episodes, 5, CONFIG), REPLAY)) == ["b"]


def test_the_oldest_leave_when_the_buffer_is_full(session):
    small = dataclasses.replace(REPLAY, buffer=3, baselines=2)
    buffer = ReplayBuffer()
    for step in range(5):
        episodes = [session(f"{step}", float(step + 1)), session(f"{step}-bad", 0.0)]
        buffer = buffer.after(prepare(episodes, 5, CONFIG), small)
    assert names(buffer) == ["2", "3", "4"]
    assert buffer.baselines == (2.0, 2.5)


def test_a_checkpoint_keeps_the_buffer():
    buffer = full(("a", 1.0, 3), ("b", 0.5, 4), baselines=(0.25, 0.5))
    assert ReplayBuffer.of_data(buffer.as_data()) == buffer
    assert ReplayBuffer.of_data({}) == ReplayBuffer()


def test_versions_follow_a_change_of_numbers():
    assert full(("a", 1.0, 3)).renumbered(4).successes == (Success("a", 1.0, 7),)


# -- what it counts for later ----------------------------------------------------------------------


@given(
    rewards=st.lists(st.floats(-10, 10), min_size=1, max_size=20),
    baselines=st.lists(st.floats(-10, 10), min_size=1, max_size=20),
    step=st.integers(0, 300),
    warmup=st.integers(0, 250),
)
def test_rewards_are_compared_with_the_median_of_recent_groups(rewards, baselines, step, warmup):
    buffer = full(
        *((str(place), reward, 0) for place, reward in enumerate(rewards)),
        baselines=tuple(baselines),
    )
    config = dataclasses.replace(REPLAY, warmup_steps=warmup)
    found = buffer.advantages(step, 0, config)
    scale = 1.0 if step >= warmup else 0.5 * (1 - math.cos(math.pi * step / warmup))
    median = statistics.median(baselines)
    expected = {str(n): scale * (reward - median) for n, reward in enumerate(rewards)}
    expected = {name: value for name, value in expected.items() if value > 0}
    assert {success.session_id: a for success, a in found.items()} == pytest.approx(
        expected, rel=1e-12
    )


def test_self_imitation_grows_from_nothing_to_all_of_its_weight():
    assert [coefficient(step, 4) for step in (0, 2, 4, 9)] == pytest.approx([0, 0.5, 1, 1])
    assert coefficient(0, 0) == 1
    buffer = full(("a", 1.0, 0))
    assert buffer.advantages(0, 0, dataclasses.replace(REPLAY, warmup_steps=4)) == {}


def test_what_the_policy_has_reached_and_what_is_too_old_is_not_drawn():
    buffer = full(("best", 1.0, 9), ("reached", 0.5, 9), ("old", 1.0, 4), baselines=(0.0, 0.5, 1.0))
    limited = dataclasses.replace(REPLAY, max_staleness=5)
    assert {s.session_id: a for s, a in buffer.advantages(0, 10, limited).items()} == {"best": 0.5}
    assert len(buffer.advantages(0, 9, limited)) == 2


# -- what is drawn ---------------------------------------------------------------------------------


@pytest.fixture
def draw(session):
    buffer = full(*((f"s{n}", 1.0, n) for n in range(10)))

    def load(session_id):
        return session(session_id, 1.0, version=int(session_id[1:]))

    def make(step=0, *, sessions=8, seed=0, version=10, share=0.5, load=load):
        replay = dataclasses.replace(REPLAY, share=share)
        config = dataclasses.replace(CONFIG, seed=seed, replay=replay)
        return buffer.draw(load, config, step=step, version=version, sessions=sessions)

    return make


def drawn(replay):
    return [item.sample.session_id for item in replay.items]


def test_seed_and_step_decide_what_is_drawn(draw):
    assert drawn(draw(3)) == drawn(draw(3))
    assert len({tuple(drawn(draw(step))) for step in range(6)}) > 1
    assert len({tuple(drawn(draw(seed=seed))) for seed in range(6)}) > 1


@pytest.mark.parametrize(
    ("share", "sessions", "expected"), [(0.5, 8, 4), (0.3, 8, 2), (1.0, 30, 10), (0.0, 30, 0)]
)
def test_a_share_of_the_steps_sessions_is_drawn_each_once(draw, share, sessions, expected):
    replay = draw(share=share, sessions=sessions)
    assert len(set(drawn(replay))) == replay.sessions == expected
    assert replay.buffer == 10


def test_a_replayed_session_is_a_group_and_a_session_of_its_own(draw):
    replay = draw(sessions=8)
    assert [item.session for item in replay.items] == [8, 9, 10, 11]
    assert len({item.group for item in replay.items}) == 4
    assert all(item.credit.tolist() == [1.0] * 4 for item in replay.items)
    assert replay.metrics() == {
        "replay/sessions": 4,
        "replay/tokens": 8,
        "replay/buffer": 10,
        "replay/staleness": 10 - np.mean([int(name[1:]) for name in drawn(replay)]),
    }


def test_tokens_that_were_too_old_when_it_was_trained_stay_out(session):
    episode = session("a", 1.0, version=[2, 6])
    assert ReplayBuffer().after(
        prepare([episode, session("b", 0.0)], 6, dataclasses.replace(CONFIG, max_staleness=1)),
        REPLAY,
    ).successes == (Success("a", 1.0, 6),)
    replay = full(("a", 1.0, 6)).draw(lambda _id: episode, CONFIG, step=0, version=9, sessions=2)
    assert replay.staleness.tolist() == [3, 3]
    assert len(replay.items) == 1


def test_a_session_that_the_store_has_no_more_is_left_out(draw, caplog):
    def load(session_id):
        raise NotFound(session_id)

    replay = draw(load=load)
    assert (replay.items, replay.sessions) == ((), 0)
    assert "is not in the store any more" in caplog.text
