"""Test which rewards reach the credit: the counted ones, at their place, and never a finding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridle.reconstruct.samples.sample import Episode
from bridle.store.reward import FindingMode, Reward, RewardKind, RewardSource
from bridle.trainer.batch.prepare import PreparedStep, prepare
from bridle.trainer.config import AdvantageConfig, FilterConfig, GrpoConfig
from bridle.trainer.credit import ADVANTAGES
from support.episodes import one_branch

VERIFIER = RewardSource.VERIFIER
BUILT_IN = (
    "grpo",
    "leave_one_out",
    "mean",
    "gated",
    "per_role",
    "gigpo",
    "turn_returns",
    "spiral",
    "lite_ppo",
    "critic",
    "aem",
    "none",
)
ROLES = (None, "planner", "worker")


def reward(name: str, value: float, at: float = 1.0, **more: Any) -> Reward:
    return Reward("s", name, value, at, **{"source": VERIFIER, **more})


def finding(
    mode: FindingMode, name: str = "git_history", value: float = 3.0, **more: Any
) -> Reward:
    return reward(name, value, 9.0, kind=RewardKind.FINDING, mode=mode, **more)


def session(name: str, rewards: Sequence[Reward], roles: Sequence[str | None] = (None,)) -> Episode:
    """One branch with a call of each role; each call samples one token after an equal prompt."""
    given = [
        replace(one, session_id=name, call_id=own(name, one.call_id), branch=own(name, one.branch))
        for one in rewards
    ]
    return one_branch(name, [([1], role) for role in roles], given, "completed")


def own(session: str, call: str | None) -> str | None:
    return None if call is None else f"{session}{call}"


def prepared(episodes: Sequence[Episode], drop: bool = False, **stated: Any) -> PreparedStep:
    config = GrpoConfig(
        advantages=AdvantageConfig(**stated), filters=FilterConfig(drop_zero_variance=drop)
    )
    return prepare(episodes, 0, config)


def credit(step: PreparedStep) -> dict[str, list[float]]:
    """Return the advantages of the sampled tokens, by session; NaN for none."""
    return {
        item.sample.session_id: item.credit[item.sample.calls >= 0].tolist() for item in step.items
    }


values = st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0, 3.0])
names = st.sampled_from(["reward", "tests", "planner", "worker", "guard:git_history"])
places = st.sampled_from(
    [
        {},
        {"call_id": "0"},
        {"call_id": "1"},
        {"turn": 2},
        {"role": "planner"},
        {"role": "nobody"},
        {"branch": "1"},
    ]
)
given_rewards = st.lists(
    st.builds(lambda name, value, place: reward(name, value, **place), names, values, places),
    min_size=1,
    max_size=4,
)
roles = st.lists(st.sampled_from(ROLES), min_size=2, max_size=3)
groups = st.lists(st.tuples(given_rewards, roles), min_size=2, max_size=4)
configurations = st.fixed_dictionaries(
    {
        "baseline": st.sampled_from(BUILT_IN),
        "reward_turns": st.sampled_from([None, "sum", "mean"]),
        "anchor": st.sampled_from(["prompt", "state", "last_n"]),
        "role_rewards": st.sampled_from([None, {"worker": ("tests", "worker")}]),
        "reward_weights": st.sampled_from([None, None, {"reward": 1.0, "tests": -0.5}]),
        "options": st.builds(
            lambda discount, gate: {
                "gigpo": {"discount": discount},
                "turn_returns": {"discount": discount},
                "gated": {"gate": gate},
            },
            st.sampled_from([1.0, 0.9]),
            st.sampled_from([0.0, 1.0]),
        ),
    }
)


UNCOUNTED: list[dict[str, Any]] = [
    {"name": "elsewhere"},
    {"name": "elsewhere", "source": RewardSource.SCORER},
    {"source": RewardSource.OPERATOR},
    {"kind": RewardKind.SUCCESS},
]


def made(group: Any) -> list[Episode]:
    return [session("abcd"[n], own, acted) for n, (own, acted) in enumerate(group)]


def test_every_built_in_estimator_is_tried() -> None:
    assert set(BUILT_IN) <= set(ADVANTAGES.names())


@settings(max_examples=150, deadline=None)
@given(
    groups,
    configurations,
    st.sampled_from(FindingMode),
    names,
    st.floats(-1e3, 1e3),
    places,
    st.sampled_from([VERIFIER, RewardSource.OPERATOR]),
)
def test_a_finding_never_raises_an_advantage_of_its_session(
    group: Any, stated: Any, mode: FindingMode, name: str, value: float, place: Any, source: Any
) -> None:
    episodes = made(group)
    before = credit(prepared(episodes, **stated))
    marked = finding(mode, name, value, **place)
    first = made([([*group[0][0], replace(marked, source=source)], group[0][1])])[0]
    after = credit(prepared([first, *episodes[1:]], **stated))
    if mode is FindingMode.WARN:
        np.testing.assert_equal(after, before)
    elif mode is FindingMode.QUARANTINE:
        assert "a" not in after
    elif "a" in before and "a" in after:
        pairs = zip(after["a"], before["a"], strict=True)
        assert all(not later > earlier for later, earlier in pairs)


@settings(max_examples=150, deadline=None)
@given(groups, configurations, values, places, st.sampled_from(UNCOUNTED))
def test_a_reward_of_a_source_name_or_kind_that_does_not_count_changes_no_advantage(
    group: Any, stated: Any, value: float, place: Any, fields: Any
) -> None:
    episodes = made(group)
    if "name" in fields:
        stated = {**stated, "reward_weights": {"reward": 1.0, "tests": -0.5}}
    other = reward(**{"name": "reward", "value": 100 * value, "at": 9.0, **fields}, **place)
    first = made([([*group[0][0], other], group[0][1])])[0]
    before, after = (prepared(each, **stated) for each in (episodes, [first, *episodes[1:]]))
    np.testing.assert_equal(credit(after), credit(before))
    assert after.session_rewards == before.session_rewards


def test_a_call_reward_of_another_source_leaves_gigpo_as_it_is() -> None:
    right, wrong = session("a", [reward("reward", 1.0)]), session("b", [reward("reward", 0.0)])
    attacked = session(
        "a",
        [reward("reward", 1.0), reward("x", -100.0, source=RewardSource.OPERATOR, call_id="0")],
    )
    before = credit(prepared([right, wrong], baseline="gigpo"))
    assert credit(prepared([attacked, wrong], baseline="gigpo")) == before
    assert before["a"][0] == pytest.approx(2 * math.sqrt(0.5), abs=1e-5)


@pytest.mark.parametrize("mode", ["warn", "zero"])
def test_of_a_cheater_and_an_honest_session_the_honest_one_is_above(mode: str) -> None:
    """The verifier believes the honest one; with ``zero`` it may believe both."""
    cheated = 0.0 if mode == "warn" else 1.0
    cheats = [session(n, [reward("reward", cheated), finding(FindingMode(mode))]) for n in "ab"]
    honest = [session(n, [reward("reward", 1.0)]) for n in "cd"]
    found = credit(prepared([*cheats, *honest]))
    assert [round(found[n][0], 3) for n in "abcd"] == [-0.866, -0.866, 0.866, 0.866]


def test_zero_takes_every_reward_whatever_its_name_weight_and_place() -> None:
    own = [
        reward("tests", 2.0),
        reward("style", 1.0),
        reward("late", 3.0, 99.0),
        reward("step", 1.0, call_id="0"),
    ]
    for stated in (
        {},
        {"reward_turns": "sum"},
        {"reward_weights": {"tests": 1.0, "style": 2.0}},
        {"baseline": "gigpo"},
    ):
        marked = session("a", [*own, finding(FindingMode.ZERO)])
        step = prepared([marked, session("b", own)], **stated)
        assert step.session_rewards[0] == 0.0 < step.session_rewards[1]


def test_a_zeroed_session_does_not_gain_by_losing_the_gate_to_its_penalties() -> None:
    own = [reward("reward", 1.0), reward("step", -5.0, call_id="0")]
    honest = session("b", [reward("reward", 0.0)])
    plain = credit(prepared([session("a", own), honest], baseline="gated"))
    marked = session("a", [*own, finding(FindingMode.ZERO)])
    assert credit(prepared([marked, honest], baseline="gated"))["a"] == plain["a"] < [0.0]


def test_a_penalty_stays_where_a_finding_takes_the_reward() -> None:
    own = [reward("reward", 1.0), reward("cost", 4.0), finding(FindingMode.ZERO)]
    weights = {"reward": 1.0, "cost": -0.5}
    step = prepared([session("a", own)], reward_weights=weights)
    assert step.session_rewards == {0: -1.0}


def test_a_finding_that_quarantines_after_the_session_keeps_it_out() -> None:
    late = session("a", [reward("reward", 1.0), finding(FindingMode.QUARANTINE)])
    step = prepared([late, session("b", [reward("reward", 0.0)])])
    assert step.sessions_dropped == {"infrastructure": 1}
    assert step.account.balanced


def test_each_role_is_compared_by_its_own_reward() -> None:
    pairs = [(1.0, 0.0), (0.0, 1.0), (1.0, 0.0), (0.0, 1.0)]
    episodes = [
        session(n, [reward("planner", p), reward("worker", w)], ["planner", "worker"])
        for n, (p, w) in zip("abcd", pairs, strict=True)
    ]
    step = prepared(episodes, drop=True, baseline="per_role")
    assert step.sessions_dropped == {}
    found = credit(step)
    for name, (plans, works) in zip("abcd", pairs, strict=True):
        assert np.sign(found[name]).tolist() == [2 * plans - 1, 2 * works - 1]


def test_a_planner_that_is_always_right_does_not_pay_for_its_worker() -> None:
    episodes = [
        session(n, [reward("planner", 1.0), reward("worker", w)], ["planner", "worker"])
        for n, w in zip("abcd", (0.0, 1.0, 0.0, 1.0), strict=True)
    ]
    found = credit(prepared(episodes, drop=True, baseline="per_role"))
    assert [found[n][0] for n in "abcd"] == [0.0] * 4
    assert [round(found[n][1], 3) for n in "abcd"] == [-0.866, 0.866, -0.866, 0.866]


@pytest.mark.parametrize("baseline", ["per_role", "spiral"])
def test_a_role_s_reward_may_have_another_name_and_one_without_has_the_session_s(
    baseline: str,
) -> None:
    episodes = [
        session(n, [reward("plan", p), reward("reward", r)], ["planner", "worker"])
        for n, (p, r) in zip("ab", ((1.0, 0.0), (0.0, 1.0)), strict=True)
    ]
    found = credit(prepared(episodes, baseline=baseline, role_rewards={"planner": "plan"}))
    assert found["a"][0] > found["b"][0]
    assert found["a"][1] < found["b"][1]


def test_a_lone_role_beside_equal_rewards_teaches_nothing_and_counts_so() -> None:
    episodes = [
        session("a", [reward("reward", 1.0)], ["planner", "worker"]),
        session("b", [reward("reward", 1.0)], ["planner"]),
    ]
    step = prepared(episodes, drop=True, baseline="per_role")
    assert (step.degenerate_groups, step.items) == (1, ())
    assert step.sessions_dropped == {"zero_variance": 2}
    assert step.account.balanced


def reference(
    terminal: Sequence[float], steps: Sequence[Sequence[float]], discount: float, weight: float
) -> list[list[float]]:
    """Return the advantages of GiGPO as the paper has it, in float64.

    The paper is arXiv 2505.10978, equations 3, 5, 6 and 7. The rewards are those of steps, and the
    terminal one is that of the last step besides. Anchors are equal states, here the place in the
    session.
    """
    rewards = [[*own[:-1], own[-1] + last] for own, last in zip(steps, terminal, strict=True)]

    def norm(values: Sequence[float]) -> list[float]:
        if len(values) < 2 or max(values) - min(values) <= 1e-9:
            return [0.0] * len(values)
        mean = math.fsum(values) / len(values)
        spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
        return [(value - mean) / (spread + 1e-6) for value in values]

    whole = norm([math.fsum(own) for own in rewards])
    later = [
        [math.fsum(discount**k * r for k, r in enumerate(own[t:])) for t in range(len(own))]
        for own in rewards
    ]
    found = [[one] * len(own) for one, own in zip(whole, rewards, strict=True)]
    for place in range(max(map(len, rewards))):
        here = [n for n, own in enumerate(rewards) if len(own) > place]
        for n, advantage in zip(here, norm([later[n][place] for n in here]), strict=True):
            found[n][place] += weight * advantage
    return found


group_of_steps = st.lists(
    st.tuples(values, st.lists(values, min_size=1, max_size=4)), min_size=2, max_size=4
)


@settings(max_examples=80, deadline=None)
@given(group_of_steps, st.sampled_from([1.0, 0.95]), st.sampled_from([1.0, 2.0]))
def test_gigpo_is_the_paper_s_when_reward_turns_is_not_set(
    group: Any, discount: float, weight: float
) -> None:
    episodes = []
    for n, (last, steps) in enumerate(group):
        own = [reward("reward", last)]
        for place, value in enumerate(steps):
            own.append(reward("step", value, 2.0 + place, call_id=str(place)))
        episodes.append(session("abcd"[n], own, [None] * len(steps)))
    options = {"gigpo": {"discount": discount, "step_weight": weight}}
    found = credit(prepared(episodes, baseline="gigpo", anchor="prompt", options=options))
    expected = reference(*zip(*group, strict=True), discount, weight)  # type: ignore[misc]
    for n, own in enumerate(expected):
        assert found["abcd"[n]] == pytest.approx(own, abs=2e-5)


@pytest.mark.parametrize("baseline", ["gigpo", "turn_returns"])
def test_a_step_reward_counts_once_in_a_return_also_when_turns_are_summed(baseline: str) -> None:
    episodes = [
        session("a", [reward("reward", 1.0), reward("step", 2.0, call_id="0")], [None, None]),
        session("b", [reward("reward", 1.0)], [None, None]),
    ]
    apart = prepared(episodes, baseline=baseline)
    summed = prepared(episodes, baseline=baseline, reward_turns="sum")
    assert apart.session_rewards == summed.session_rewards == {0: 3.0, 1: 1.0}
    assert credit(apart) == credit(summed)


def test_a_session_with_rewards_of_calls_alone_is_trained_by_what_reads_them() -> None:
    episodes = [
        session(n, [reward("step", value, call_id="0")]) for n, value in (("a", 1.0), ("b", 0.0))
    ]
    assert prepared(episodes, baseline="grpo").sessions_dropped == {"unrewarded": 2}
    for baseline in ("gigpo", "turn_returns", "spiral"):
        found = credit(prepared(episodes, baseline=baseline))
        assert found["a"][0] > found["b"][0]


def test_a_session_reward_named_reward_does_not_switch_off_those_of_steps() -> None:
    own = [reward("reward", 1.0), reward("format", 5.0), reward("step", 0.5, call_id="0")]
    (alone,) = prepared([session("a", own)]).rewards
    (summed,) = prepared([session("a", own)], reward_turns="sum").rewards
    assert (alone, summed) == (1.0, 1.5)


@pytest.mark.parametrize("baseline", ["per_role", "spiral"])
def test_rewards_at_roles_and_at_their_calls_reach_these_roles_alone(baseline: str) -> None:
    given = {"a": (1.0, 0.0), "b": (0.0, 1.0)}
    acted = ["planner", "worker"]
    by_role = [
        session(n, [reward("own", p, role="planner"), reward("own", w, role="worker")], acted)
        for n, (p, w) in given.items()
    ]
    by_call = [
        session(n, [reward("own", p, call_id="0"), reward("own", w, branch="1")], acted)
        for n, (p, w) in given.items()
    ]
    found = credit(prepared(by_role, drop=True, baseline=baseline))
    assert found == credit(prepared(by_call, drop=True, baseline=baseline))
    assert found["a"][0] > found["b"][0]
    assert found["a"][1] < found["b"][1]


def test_a_role_s_return_is_its_own_reward_and_those_of_its_steps() -> None:
    step = reward("step", 0.5, call_id="1")
    scored = {
        "a": [reward("reward", 1.0), step],
        "b": [reward("reward", 1.0)],
        "c": [reward("reward", 1.5)],
    }
    for stated in ({}, {"reward_turns": "sum"}):
        episodes = [session(n, one, ["planner", "worker"]) for n, one in scored.items()]
        found = credit(prepared(episodes, baseline="per_role", **stated))
        assert found["a"][0] == found["b"][0] < found["c"][0], "a step of the worker is not its own"
        assert found["b"][1] < found["a"][1] == found["c"][1]


def test_a_role_may_have_several_rewards_and_a_scorer_s_if_a_weight_names_it() -> None:
    scorer = RewardSource.SCORER
    episodes = [
        session(
            n,
            [reward("plan", p), reward("format", f), reward("judge", j, source=scorer)],
            ["planner"],
        )
        for n, p, f, j in (("a", 1.0, 0.0, 0.0), ("b", 0.0, 1.0, 0.0), ("c", 0.0, 0.0, 1.0))
    ]
    mapped = {"planner": ("plan", "format", "judge")}
    found = credit(prepared(episodes, baseline="per_role", role_rewards=mapped))
    assert found["c"] < found["a"] == found["b"]
    weights = {"plan": 1.0, "format": 2.0, "judge": 3.0}
    weighted = {"role_rewards": mapped, "reward_weights": weights}
    found = credit(prepared(episodes, baseline="per_role", **weighted))
    assert found["a"] < found["b"] < found["c"]
    found = credit(prepared(episodes, reward_weights=weights))
    assert found["a"] < found["b"] < found["c"]


@pytest.mark.parametrize("baseline", ["gigpo", "turn_returns"])
def test_a_role_s_reward_is_one_of_its_last_step_and_counts_once(baseline: str) -> None:
    acted = ["planner", "worker", "planner"]
    plain = [reward("reward", 1.0)]
    for place, same in ({"role": "planner"}, "2"), ({"branch": "1"}, "1"):
        given, as_call = reward("own", 2.0, **place), reward("own", 2.0, call_id=same)
        steps = [
            prepared([session("a", [*plain, one], acted), session("b", plain, acted)], **stated)
            for one in (given, as_call)
            for stated in ({"baseline": baseline}, {"baseline": baseline, "reward_turns": "sum"})
        ]
        assert {tuple(step.rewards) for step in steps} == {(3.0, 1.0)}
        assert all(credit(step) == credit(steps[0]) for step in steps)


def test_a_reward_of_a_turn_that_is_not_there_is_counted_and_changes_nothing() -> None:
    own = [reward("reward", 1.0)]
    lost = prepared([session("a", [*own, reward("step", 9.0, turn=7)])], reward_turns="sum")
    assert (lost.unplaced_rewards, lost.rewards) == (1, (1.0,))


def test_a_reward_has_one_place() -> None:
    for places in (
        {"role": "planner", "branch": "c"},
        {"role": "planner", "turn": 1},
        {"branch": "c", "call_id": "c"},
    ):
        with pytest.raises(ValueError, match="has several places"):
            reward("reward", 1.0, **places)
