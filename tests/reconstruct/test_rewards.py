"""Rewards: named, late, many; of sessions, calls and turns; added up as the run states."""

import pytest

from bridle.reconstruct.rewards import (
    Aggregation,
    CountedRewards,
    session_rewards,
    turn_rewards,
)
from bridle.store.records import Reward, RewardSource, RunRecord


def given(*values):
    verifier = RewardSource.VERIFIER
    return [
        Reward("s", name, value, at, call_id=call, source=verifier)
        for name, value, at, call in values
    ]


SOME = given(
    ("score", 0.1, 1.0, None),
    ("score", 0.7, 3.0, None),
    ("score", 0.4, 2.0, None),
    ("style", 0.2, 1.0, None),
    ("step", 1.0, 1.0, "a"),
    ("step", 0.0, 2.0, "b"),
    ("step", 0.5, 3.0, "a"),
)


def test_of_several_values_the_latest_counts_however_they_arrive():
    assert session_rewards(SOME) == session_rewards(SOME[::-1]) == {"score": 0.7, "style": 0.2}
    assert turn_rewards(SOME, "step") == {"a": 0.5, "b": 0.0}


@pytest.mark.parametrize(
    ("aggregation", "value"),
    [
        (Aggregation(), 0.7 + 0.2),
        (Aggregation({"score": 2.0}), 1.4),
        (Aggregation({"score": 1.0, "none": 1.0}), None),
        (Aggregation({"step": 1.0}), None),
        (Aggregation({"step": 1.0}, turns="sum"), 0.5),
        (Aggregation({"step": 1.0}, turns="mean"), 0.25),
        (Aggregation({"step": 1.0}, turns="min"), 0.0),
        (Aggregation({"step": 1.0}, turns="max"), 0.5),
        (Aggregation({"step": 1.0}, turns="last"), 0.5),
    ],
)
def test_a_run_states_how_they_add_up(aggregation, value):
    assert aggregation.value(SOME) == (None if value is None else pytest.approx(value, abs=1e-15))
    assert Aggregation.from_data(aggregation.as_data()) == aggregation


def test_a_name_given_to_the_session_is_not_made_of_its_turns():
    both = [*SOME, *given(("score", 9.0, 9.0, "a"))]
    assert Aggregation({"score": 1.0}, turns="sum").value(both) == 0.7


def test_nothing_adds_up_to_nothing_and_unknown_ways_are_refused():
    assert Aggregation().value([]) is None
    with pytest.raises(ValueError, match="turns must be"):
        Aggregation(turns="median")


def test_values_keep_every_bit_and_late_ones_are_taken(record, writer, reader):
    session = record()
    call = session.call([1], [5])
    odd = 0.1 + 0.2
    writer.update_session_sync(session.id, sealed_at=5.0, outcome="completed")
    writer.add_sync(Reward(session.id, "score", odd, 9.0))
    writer.add_sync(Reward(session.id, "step", -odd, 9.5, call_id=call, turn=1))
    whole, step = reader.rewards(session.id)
    assert (whole.value.hex(), step.value.hex()) == (odd.hex(), (-odd).hex())
    assert (step.call_id, step.turn) == (call, 1)


def test_the_runs_aggregation_is_kept_with_the_run(writer, reader):
    stated = Aggregation({"score": 1.0}, turns="mean")
    writer.add_sync(RunRecord("r", "train", 1.0, config={"reward": stated.as_data()}))
    assert Aggregation.from_data(reader.run("r").config["reward"]) == stated


def test_only_rewards_of_the_named_sources_count():
    verifiers = Reward("s", "score", 0.5, 1.0, source=RewardSource.VERIFIER)
    later = Reward("s", "score", 9.0, 2.0, source=RewardSource.OPERATOR)
    old = Reward("s", "score", 100.0, 3.0, source=RewardSource.UNATTESTED)
    mine = [verifiers, later, old]
    assert Aggregation().value(mine) == 0.5
    assert Aggregation(sources=("verifier", "operator")).value(mine) == 9.0
    assert Aggregation({"score": 1.0}).value([later, old]) is None
    with pytest.raises(ValueError, match="there is no source of rewards agent, but verifier"):
        Aggregation(sources=("agent",))


@pytest.mark.parametrize(
    ("config", "counted"),
    [
        ({}, ["verifier"]),
        ({"reward": Aggregation(sources=("operator",)).as_data()}, ["operator"]),
        (None, ["verifier", "operator"]),
    ],
)
def test_the_sources_that_a_run_states_count_and_none_that_nobody_vouches_for(
    writer, reader, calls, config, counted
):
    if config is not None:
        writer.add_sync(RunRecord("r", "train", 1.0, config=config))
    session = calls.session(run_id=None if config is None else "r")
    mine = [Reward(session.id, "score", 1.0, 1.0, source=source) for source in RewardSource]
    found = CountedRewards(reader).of(session, mine)
    assert [reward.source for reward in found] == counted
    assert CountedRewards(reader, ["unattested"]).of(session, mine) == mine[-1:]
