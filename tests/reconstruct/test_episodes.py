import pytest

from reconstruct.episodes import build_episode, episodes
from reconstruct.rewards import session_rewards
from store.errors import NotFound
from store.records import Reward


def test_an_episode_has_its_samples_rewards_and_table(reader, writer, agent):
    reward = Reward(agent.id, "reward", 1.0, 5.0)
    writer.add_reward_sync(reward)
    episode = build_episode(reader, agent.id)
    assert episode.session == reader.session(agent.id)
    assert episode.rewards == (reward,)
    assert len(episode.samples) == 5
    assert episode.conservation.balanced


def test_episodes_are_streamed_by_filter(reader, record):
    for group in ("a", "a", "b"):
        record(group_id=group).call([1], [2])
    found = episodes(reader, group="a")
    assert next(found).session.group_id == "a"
    assert len(list(found)) == 1


def test_an_unknown_session_is_an_error(reader):
    with pytest.raises(NotFound):
        build_episode(reader, "session_none")


def test_an_unknown_builder_is_an_error(reader, agent):
    with pytest.raises(KeyError):
        build_episode(reader, agent.id, builder="guess")


def test_the_latest_value_of_a_name_counts_and_those_of_turns_do_not():
    rewards = [
        Reward("s", "reward", 0.5, 2.0),
        Reward("s", "reward", 0.1, 1.0),
        Reward("s", "reward", 9.0, 3.0, turn=1),
        Reward("s", "speed", 7.0, 3.0, call_id="c"),
    ]
    assert session_rewards(rewards) == {"reward": 0.5}
