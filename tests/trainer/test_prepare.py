"""Sessions are judged in one order, and no token goes missing on the way."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.reconstruct.samples.sample import Conservation
from bridle.store.reward import Reward, RewardSource
from bridle.trainer.batch.filters import ConservationError
from bridle.trainer.batch.prepare import prepare
from bridle.trainer.config import AdvantageConfig, FilterConfig, GrpoConfig
from bridle.trainer.credit.rewards import numbers_of


@pytest.fixture
def session(make_sample, make_episode):
    def make(name, reward, *, trained=(2, 3), version=5, weight=1.0, role=None, **fields):
        sample = make_sample(
            [1, 2, 3, 4], trained, session=name, version=version, weight=weight, role=role
        )
        return make_episode([sample], reward, session=name, **fields)

    return make


def advantages(prepared):
    return {item.sample.session_id: round(float(item.credit[0]), 6) for item in prepared.items}


PLAIN = GrpoConfig(advantages=AdvantageConfig(baseline="mean"))


def test_the_baseline_is_the_whole_group_before_anything_is_dropped(session):
    episodes = [
        session("good", 1.0),
        session("slow", 0.0, outcome="timeout"),
        session("old", 0.0, version=1),
        session("silent", 0.0, trained=()),
    ]
    prepared = prepare(episodes, 5, PLAIN)
    assert advantages(prepared) == {"good": 0.75}
    assert prepared.sessions_dropped == {"empty": 1, "infrastructure": 1, "stale": 1}


def test_sessions_without_a_group_are_compared_within_their_suites_and_splits_task(session):
    def of_task(name, reward, suite, split):
        episode = session(name, reward, group=None)
        task = {"task_suite": suite, "task_split": split, "task_id": "1"}
        return dataclasses.replace(episode, session=dataclasses.replace(episode.session, **task))

    episodes = [
        of_task("a", 1.0, "shop", "train"),
        of_task("b", 0.0, "shop", "train"),
        of_task("c", 4.0, "maths", "train"),
        of_task("d", 2.0, "maths", "train"),
        of_task("e", 9.0, "maths", "eval"),
        of_task("f", 3.0, "maths", "eval"),
    ]
    found = advantages(prepare(episodes, 5, PLAIN))
    assert found == {"a": 0.5, "b": -0.5, "c": 1.0, "d": -1.0, "e": 3.0, "f": -3.0}


def test_an_excluded_outcome_does_not_touch_the_baseline(session):
    episodes = [
        session("a", 1.0),
        session("b", 0.0),
        session("broken", 0.0, outcome="infrastructure"),
    ]
    prepared = prepare(episodes, 5, PLAIN)
    assert advantages(prepared) == {"a": 0.5, "b": -0.5}
    assert prepared.rewards == (1.0, 0.0)


def test_outcomes_follow_the_configured_policy(session):
    config = dataclasses.replace(PLAIN, filters=FilterConfig(outcomes={}))
    prepared = prepare([session("a", 1.0), session("slow", 0.0, outcome="timeout")], 5, config)
    assert advantages(prepared) == {"a": 0.5, "slow": -0.5}


def test_groups_in_which_all_rewards_are_equal_are_left_out_and_counted(session):
    episodes = [
        session("a", 1.0, group="easy"),
        session("b", 1.0, group="easy"),
        session("c", 1.0, group="hard"),
        session("d", 0.0, group="hard"),
    ]
    prepared = prepare(episodes, 5, PLAIN)
    assert set(advantages(prepared)) == {"c", "d"}
    assert prepared.account.dropped == {"zero_variance": 4}
    assert (prepared.groups, prepared.degenerate_groups) == (2, 1)


def test_a_stale_token_masks_itself_and_not_its_session(make_sample, make_episode):
    fresh = make_sample([1, 2, 3, 4], [1, 2, 3], session="a", version=5)
    versions = fresh.versions.copy()
    versions[1] = 2
    episodes = [
        make_episode([dataclasses.replace(fresh, versions=versions)], 1.0, session="a"),
        make_episode([make_sample([1, 2, 9], [2], session="b", version=5)], 0.0, session="b"),
    ]
    prepared = prepare(episodes, 5, dataclasses.replace(PLAIN, max_staleness=1))
    assert prepared.sessions_dropped == {}
    assert prepared.account.masked == {"stale": 1}
    assert prepared.account.trained == 3
    assert prepared.account.balanced
    assert prepared.staleness.tolist() == [0, 0, 0]


def test_staleness_is_bounded_in_policy_versions(session):
    episodes = [session("a", 1.0, version=3), session("b", 0.0, version=2)]
    for bound, kept in ((2, {"a"}), (3, {"a", "b"}), (0, set())):
        config = dataclasses.replace(PLAIN, max_staleness=bound)
        assert set(advantages(prepare(episodes, 5, config))) == kept


def test_sessions_without_a_reward_are_dropped_with_that_reason(session):
    prepared = prepare([session("a", None), session("b", 1.0), session("c", 0.0)], 5, PLAIN)
    assert prepared.sessions_dropped == {"unrewarded": 1}


def test_a_session_of_weightless_samples_is_dropped_with_that_reason(session):
    prepared = prepare([session("a", 1.0, weight=0.0), session("b", 0.0)], 5, PLAIN)
    assert prepared.sessions_dropped == {"weightless": 1}
    assert advantages(prepared) == {"b": -0.5}


def test_tokens_of_a_role_that_acted_in_one_session_are_masked_and_counted(
    make_sample, make_episode
):
    def acted(name, reward, roles):
        samples = [
            dataclasses.replace(
                make_sample([1, 2, 3], (1, 2), session=name, role=role, weight=1 / len(roles)),
                call_ids=(f"{name}-{role}",),
            )
            for role in roles
        ]
        return make_episode(samples, reward, session=name)

    episodes = [acted("a", 1.0, (None, "search")), acted("b", 0.0, (None,))]
    config = GrpoConfig(advantages=AdvantageConfig(baseline="per_role"))
    prepared = prepare(episodes, 0, config)
    found = {
        (item.sample.session_id, item.sample.role): round(float(item.credit[1]), 4)
        for item in prepared.items
    }
    assert found == {("a", None): 0.7071, ("b", None): -0.7071}
    assert prepared.account.masked == {"no_baseline": 2}
    assert prepared.account.balanced


@given(
    st.lists(
        st.tuples(
            st.sampled_from([None, 0.0, 1.0]),
            st.sampled_from(["completed", "timeout", "infrastructure", None]),
            st.integers(0, 3),
            st.integers(0, 4),
            st.integers(0, 5),
        ),
        max_size=8,
    )
)
def test_tokens_are_conserved_by_every_mix_of_filters(rows):
    # Fixtures are made once per test, examples many times: so the makers are called through here.
    episodes = [
        MAKE["episode"](
            [MAKE["sample"](list(range(6)), range(1, 1 + count), session=str(i), version=version)],
            reward,
            session=str(i),
            outcome=outcome,
            group=str(i % 3),
            masked={"length": masked},
            dropped={"side": 2},
        )
        for i, (reward, outcome, version, count, masked) in enumerate(rows)
    ]
    prepared = prepare(episodes, 3, GrpoConfig(max_staleness=1))
    account = prepared.account
    assert account.balanced
    assert account.captured == sum(episode.conservation.captured for episode in episodes)
    assert account.trained == sum(int(item.sample.mask.sum()) for item in prepared.items)


MAKE = {}


@pytest.fixture(autouse=True)
def _makers(make_sample, make_episode):
    MAKE.update(sample=make_sample, episode=make_episode)


def test_a_session_whose_table_does_not_add_up_is_refused(session):
    episode = session("a", 1.0)
    for table in (Conservation(captured=3, trained=2), Conservation(captured=1, trained=1)):
        broken = dataclasses.replace(episode, conservation=table)
        with pytest.raises(ConservationError, match="bridle audit"):
            prepare([broken], 5, PLAIN)


def number(episode, **stated):
    return numbers_of(episode, AdvantageConfig(**stated)).value


def test_the_latest_session_reward_of_a_name_counts_and_call_rewards_do_not(session):
    rewards = (
        Reward("a", "score", 0.25, created_at=2.0, source=RewardSource.VERIFIER),
        Reward("a", "score", 1.0, created_at=1.0, source=RewardSource.VERIFIER),
        Reward("a", "style", 0.5, created_at=1.0, source=RewardSource.VERIFIER),
        Reward("a", "score", 9.0, created_at=3.0, source=RewardSource.VERIFIER, call_id="c"),
        Reward("a", "score", 9.0, created_at=3.0, source=RewardSource.VERIFIER, turn=1),
    )
    episode = dataclasses.replace(session("a", None), rewards=rewards)
    assert number(episode) == 0.75
    assert number(episode, reward_weights={"score": 2.0}) == 0.5
    assert number(episode, reward_weights={"score": 1.0, "missing": 1.0}) is None


def test_rewards_of_turns_count_as_the_run_says(session):
    rewards = tuple(
        Reward(
            "a",
            "step",
            value,
            created_at=1.0 + turn,
            source=RewardSource.VERIFIER,
            call_id=f"c{turn}",
        )
        for turn, value in enumerate((0.5, 1.0, 0.0))
    )
    episode = dataclasses.replace(session("a", None), rewards=rewards)
    assert number(episode) is None
    assert number(episode, reward_turns="mean") == 0.5
    assert number(episode, reward_weights={"step": 2.0}, reward_turns="last") == 0.0
    config = dataclasses.replace(PLAIN, advantages=AdvantageConfig(reward_turns="max"))
    assert prepare([episode], 5, config).rewards == (1.0,)
