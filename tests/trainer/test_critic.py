"""The turn critic: GAE over steps, and a value that is learned from the run's own sessions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridle.reconstruct.samples.sample import Episode
from bridle.store.reward import Reward, RewardSource
from bridle.trainer.batch.prepare import prepare
from bridle.trainer.config import AdvantageConfig, GrpoConfig
from bridle.trainer.credit import ADVANTAGES, CreditGroup
from support.episodes import one_branch

PLACES = 3


def session(name: str, seen: list[int], steps: list[float], terminal: float) -> Episode:
    """One session: the place that each step sees, and the rewards of the steps and of all."""
    given = [
        Reward(name, "step", value, 0.0, call_id=f"{name}{number}", source=RewardSource.VERIFIER)
        for number, value in enumerate(steps)
    ]
    given.append(Reward(name, "reward", terminal, 0.0, source=RewardSource.VERIFIER))
    return one_branch(name, [([place], None) for place in seen], given, "completed")


def credited(
    episodes: list[Episode], memory: dict[str, float], **options: Any
) -> list[list[float]]:
    config = AdvantageConfig("critic", anchor="last_observation", options={"critic": options})
    rewards = np.asarray([one.rewards[-1].value for one in episodes])
    group = CreditGroup(episodes, rewards, config, memory)
    found = ADVANTAGES.configured("critic", config.options)(group)
    return [
        [float(part[0][sample.calls == number][0]) for number in range(len(sample.call_ids))]
        for part, one in zip(found, episodes, strict=True)
        for sample in one.samples
    ]


def reference(
    sessions: list[tuple[list[int], list[float], float]],
    values: np.ndarray[Any, Any],
    discount: float,
    trace: float,
    rate: float,
) -> tuple[list[list[float]], np.ndarray[Any, Any]]:
    """GAE as its sum over errors, and one pass over a table of values, in float64."""
    found = []
    for seen, steps, terminal in sessions:
        rewards = [*steps[:-1], steps[-1] + terminal]
        own = [values[place] for place in seen] + [0.0]
        errors = [
            reward + discount * own[number + 1] - own[number]
            for number, reward in enumerate(rewards)
        ]
        found.append(
            [
                sum((discount * trace) ** (k - t) * errors[k] for k in range(t, len(errors)))
                for t in range(len(errors))
            ]
        )
    learned, before = values.copy(), values
    for (seen, _, _), advantages in zip(sessions, found, strict=True):
        for place, advantage in zip(seen, advantages, strict=True):
            learned[place] += rate * (advantage + before[place] - learned[place])
    return found, learned


numbers = st.floats(-2, 2, allow_nan=False, width=32)
played = st.lists(st.tuples(st.integers(0, PLACES - 1), numbers), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.tuples(played, numbers), min_size=1, max_size=3), min_size=1, max_size=3),
    st.sampled_from([0.0, 0.9, 1.0]),
    st.sampled_from([0.0, 0.95, 1.0]),
    st.sampled_from([0.1, 1.0]),
)
def test_the_critic_is_gae_over_a_table_of_values(
    groups: list[Any], discount: float, trace: float, rate: float
) -> None:
    memory: dict[str, float] = {}
    values = np.zeros(PLACES)
    for number, group in enumerate(groups):
        sessions = [([p for p, _ in own], [r for _, r in own], last) for own, last in group]
        episodes = [session(f"{number}-{n}", *one) for n, one in enumerate(sessions)]
        options = {"discount": discount, "trace": trace, "rate": rate, "normalize": False}
        found = credited(episodes, memory, **options)
        expected, values = reference(sessions, values, discount, trace, rate)
        for own, right in zip(found, expected, strict=True):
            assert own == pytest.approx(right, rel=1e-5, abs=1e-5)


def test_a_critic_outlives_the_group_and_credits_the_step_that_mattered() -> None:
    memory: dict[str, float] = {}
    for number in range(40):
        won, lost = session(f"w{number}", [1], [0.0], 1.0), session(f"l{number}", [2], [0.0], 0.0)
        credited([won, lost], memory)
    good = session("g", [0, 1], [0.0, 0.0], 0.0)
    bad = session("b", [0, 2], [0.0, 0.0], 0.0)
    (into_good, out_of_good), (into_bad, _) = credited(
        [good, bad], memory, trace=0.0, normalize=False
    )
    assert into_good == pytest.approx(1.0, abs=0.01)
    assert out_of_good == pytest.approx(-1.0, abs=0.01)
    assert into_bad == pytest.approx(0.0, abs=0.01)
    assert all(key.startswith("critic|") for key in memory)


def test_one_option_of_a_run_chooses_it() -> None:
    config = GrpoConfig(advantages=AdvantageConfig("critic"))
    episodes = [session("a", [0, 1], [0.0, 0.0], 1.0), session("b", [0, 2], [0.0, 0.0], 0.0)]
    memory: dict[str, float] = {}
    step = prepare(episodes, 0, config, memory)
    assert len(step.items) == 2
    assert memory
