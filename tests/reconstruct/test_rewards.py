"""Rewards: named, late, many; of sessions, calls and turns; added up as the run states."""

import pytest

from bridle.reconstruct import open_store
from bridle.reconstruct.rewards import (
    Aggregation,
    CountedRewards,
    RewardNotice,
    session_rewards,
    turn_rewards,
)
from bridle.reconstruct.session import LoadedSession
from bridle.store.records import RunRecord
from bridle.store.reward import FindingMode, Reward, RewardKind, RewardSource


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
    mine = [verifiers, later]
    assert Aggregation().value(mine) == 0.5
    assert Aggregation(sources=("verifier", "operator")).value(mine) == 9.0
    assert Aggregation({"score": 1.0}).value([later]) is None
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
def test_the_sources_that_a_run_states_count(writer, reader, calls, config, counted):
    if config is not None:
        writer.add_sync(RunRecord("r", "train", 1.0, config=config))
    session = calls.session(run_id=None if config is None else "r")
    mine = [Reward(session.id, "score", 1.0, 1.0, source=source) for source in RewardSource]
    found = CountedRewards(reader).of(session, mine)
    assert [reward.source for reward in found] == counted
    assert CountedRewards(reader, ["operator"]).of(session, mine) == mine[-1:]


SCORED = given(("reward", 0.0, 1.0, None), ("short", 1.0, 1.0, None), ("step", 0.5, 1.0, "a"))


def found(mode, **more):
    verifier = RewardSource.VERIFIER
    fields = {"session_id": "s", "name": "x", "value": 7.0, "created_at": 8.0, "mode": mode}
    return Reward(**fields | {"source": verifier, "kind": RewardKind.FINDING} | more)


@pytest.mark.parametrize(
    ("aggregation", "value", "line"),
    [
        (Aggregation(), 0.0, "the one named reward; recorded but not counted: short"),
        (Aggregation(turns="sum"), 0.5, "the one named reward"),
        (Aggregation({"short": 2.0}), 2.0, "2 × short; recorded but not counted: reward"),
        (Aggregation({"reward": 1.0, "step": 1.0}), 0.0, "1 × reward + 1 × step"),
    ],
)
def test_the_reward_named_reward_counts_alone_unless_there_are_weights(aggregation, value, line):
    assert aggregation.value(SCORED) == value
    assert line in aggregation.stated(SCORED)


def test_without_one_named_reward_the_sum_counts_and_a_line_says_so_once():
    lines = []
    notice = RewardNotice(lines.append)
    for _ in range(3):
        notice(Aggregation(), SOME)
    assert lines == [
        "a session's reward is the sum of score, style, since none is named reward; "
        "step of its calls and roles counts in estimators for steps and roles alone"
    ]
    notice(Aggregation(), SCORED)
    assert len(lines) == 2, "a session that is scored in another way is reported too"
    notice(Aggregation(), [])
    assert len(lines) == 2


def test_a_call_has_the_weighted_sum_of_what_it_was_given_and_no_rule_of_names():
    both = [*SCORED, *given(("reward", 3.0, 1.0, "a"), ("step", 1.0, 1.0, "b"))]
    assert Aggregation().numbers(both).calls == {"a": 3.5, "b": 1.0}
    weighted = Aggregation({"reward": 1.0, "step": 2.0}).numbers(both)
    assert (weighted.calls, weighted.own) == ({"a": 4.0, "b": 2.0}, 0.0)
    assert weighted.episode == 6.0
    missing = Aggregation({"reward": 1.0, "none": 1.0}).numbers(both)
    assert (missing.value, missing.own, missing.episode) == (None, None, None)


@pytest.mark.parametrize("source", list(RewardSource))
@pytest.mark.parametrize("mode", list(FindingMode))
def test_a_finding_is_no_number_and_acts_by_its_mode_alone(mode, source):
    scores = given(("reward", 1.0, 1.0, None), ("cost", -2.0, 1.0, None), ("step", 3.0, 1.0, "a"))
    marked = [*scores, found(mode, name="reward", source=source)]
    acts = mode is not FindingMode.WARN
    named = {"reward": 0.0 if acts else 1.0, "cost": -2.0}
    assert session_rewards(marked) == named
    assert turn_rewards(marked, "step") == {"a": 0.0 if acts else 3.0}
    numbers = Aggregation(turns="sum").numbers(marked)
    assert numbers.value == (0.0 if acts else 4.0)
    assert numbers.calls == {"a": 0.0 if acts else 3.0}


def test_only_findings_have_a_mode():
    assert found(None).mode is FindingMode.WARN
    with pytest.raises(ValueError, match="is a score: only a finding has a mode"):
        found(FindingMode.ZERO, kind=RewardKind.SCORE)


def test_a_reward_by_the_number_of_a_turn_reaches_the_call_of_that_turn(
    record, writer, reader, caplog
):
    session = record()
    ids = [session.call([1, n], [5]) for n in range(3)]
    verifier = RewardSource.VERIFIER
    for turn, value in ((2, 1.0), (3, 0.5), (9, 4.0)):
        writer.add_sync(Reward(session.id, "step", value, 9.0, turn=turn, source=verifier))
    writer.add_sync(Reward(session.id, "step", 0.25, 9.5, call_id=ids[2], source=verifier))
    loaded = LoadedSession.load(reader, session.id)
    assert loaded.turn_rewards("step") == {ids[1]: 1.0, ids[2]: 0.25}
    assert Aggregation().numbers(loaded.all_rewards).calls == {ids[1]: 1.0, ids[2]: 0.25}
    assert "is for turn 9, but the session has 3: it reaches no call" in caplog.text


def test_the_operators_rewards_are_the_sessions_where_it_belongs_to_no_run(record, writer, url):
    writer.add_sync(RunRecord("r", "train", 1.0, config={"reward": {"weights": {"tests": 2.0}}}))
    alone, in_run = record(), record(run_id="r")
    for session in (alone, in_run):
        writer.add_sync(Reward(session.id, "reward", 1.0, 2.0))
        writer.add_sync(
            Reward(session.id, "tests", 0.25, 2.0, source=RewardSource.VERIFIER, turn=None)
        )
    with open_store(url) as opened:
        assert opened.session(alone.id).reward() == 1.0
        assert opened.session(alone.id).reward(Aggregation(turns="mean")) == 1.0
        assert opened.session(in_run.id).reward() == 0.5
        assert opened.session(in_run.id).reward(Aggregation()) == 0.25
        everything = LoadedSession.load(opened.reader, in_run.id)
        assert everything.reward(Aggregation(sources=("operator",))) == 1.0


def test_plain_sql_reads_the_same_scores(record, writer, url):
    sources = list(RewardSource)
    for number, mode in enumerate((None, *FindingMode)):
        session = record()
        for at, (name, value) in enumerate((("a", 2.0), ("b", -1.0), ("a", 1.0), ("a", 3.0))):
            writer.add_sync(Reward(session.id, name, value, at, source=sources[at == 3]))
        if mode is not None:
            writer.add_sync(found(mode, session_id=session.id, source=sources[number % 2]))
    with open_store(url) as opened:
        for session in opened.sessions():
            for source in ("verifier", "operator"):
                rows = opened.query(
                    "SELECT name, value FROM scores WHERE session_id = :id AND source = :source",
                    id=session.id,
                    source=source,
                ).to_pylist()
                own = [r for r in session.all_rewards if r.is_finding or r.source == source]
                assert {row["name"]: row["value"] for row in rows} == session_rewards(own)
