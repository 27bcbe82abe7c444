import pytest
from sqlalchemy import event

from bridle.reconstruct.episodes import episode_of, episodes
from bridle.reconstruct.rewards import session_rewards
from bridle.reconstruct.session import LoadedSession
from bridle.store.errors import NotFound
from bridle.store.reading.queries import Reader
from bridle.store.reward import Reward


def test_an_episode_has_its_samples_rewards_and_table(reader, writer, agent):
    reward = Reward(agent.id, "reward", 1.0, 5.0)
    writer.add_sync(reward)
    episode = episode_of(LoadedSession.load(reader, agent.id))
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


def test_sessions_are_read_some_at_a_time_and_each_as_alone(reader, record, monkeypatch):
    monkeypatch.setattr("bridle.reconstruct.session.AT_ONCE", 2)
    asked = []
    real = Reader.recorded_of
    monkeypatch.setattr(
        Reader, "recorded_of", lambda self, ids: asked.append(len(ids)) or real(self, ids)
    )
    for number in range(5):
        session = record()
        first = session.call([1, 2], [3 + number])
        session.call([1, 2, 3 + number, 4], [5], parent=first)
    found = episodes(reader)
    next(found)
    assert asked == [2], "later sessions wait until they are asked for"
    ids = [episode.session.id for episode in episodes(reader)]
    assert asked == [2, 2, 2, 1]
    for session_id, episode in zip(ids, episodes(reader), strict=True):
        alone = episode_of(LoadedSession.load(reader, session_id))
        assert alone.conservation == episode.conservation
        (left,), (right,) = alone.samples, episode.samples
        assert left.token_ids.tolist() == right.token_ids.tolist()
        assert left.logprobs.tobytes() == right.logprobs.tobytes()


def test_a_call_that_ends_while_its_session_is_read_takes_no_token_away(reader, record):
    """It begins and ends after the calls were read and before the spans are."""
    session = record()
    first = session.call([1], [5, 6])
    late = []

    def go_on(connection, cursor, statement, *_):
        if "FROM spans" in statement and not late:
            late.append(session.call([1, 5, 6, 2], [7], parent=first))

    event.listen(reader.engine, "before_cursor_execute", go_on)
    (episode,) = episodes(reader)
    assert late
    assert (episode.conservation.trained, episode.conservation.dropped) == (2, {})
    assert [sample.token_ids.tolist() for sample in episode.samples] == [[1, 5, 6]]


def test_an_unknown_session_is_an_error(reader):
    with pytest.raises(NotFound):
        episode_of(LoadedSession.load(reader, "session_none"))


def test_an_unknown_builder_is_an_error(reader, agent):
    with pytest.raises(KeyError):
        episode_of(LoadedSession.load(reader, agent.id), builder="guess")


def test_the_latest_value_of_a_name_counts_and_those_of_turns_do_not():
    rewards = [
        Reward("s", "reward", 0.5, 2.0),
        Reward("s", "reward", 0.1, 1.0),
        Reward("s", "reward", 9.0, 3.0, turn=1),
        Reward("s", "speed", 7.0, 3.0, call_id="c"),
    ]
    assert session_rewards(rewards) == {"reward": 0.5}
