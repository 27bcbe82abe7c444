"""The rewards that were given in, and those that a store returns."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from bridle.harnesses.given import GivenRewards, RewardsDiffer
from bridle.store.reward import FindingMode, Reward, RewardKind, RewardSource


def stored(value: float = 0.5, name: str = "reward", **fields: object) -> Reward:
    fields = {"session_id": "ses_1", "source": RewardSource.VERIFIER, **fields}
    return Reward(name=name, value=value, created_at=time.time(), **fields)  # type: ignore[arg-type]


@pytest.fixture(params=["in memory", "resumed"])
def given(request: pytest.FixtureRequest, tmp_path: Path) -> GivenRewards:
    file = tmp_path / "given.jsonl" if request.param == "resumed" else None
    made = GivenRewards(file)
    made.begin("ses_1")
    made.add(stored())
    made.begin("ses_2")
    made.begin("ses_4")
    zero = {"kind": RewardKind.FINDING, "mode": FindingMode.ZERO}
    made.add(stored(1.0, "network", session_id="ses_4", **zero))
    made.begin("ses_5")
    made.add(stored(1.0, "step", session_id="ses_5", call_id="c", turn=1))
    made.add(stored(1.0, "cost", session_id="ses_5", role="worker", source=RewardSource.SCORER))
    if file is None:
        return made
    with file.open("ab") as cut:
        cut.write(b'{"session": "ses_3", "na')
    return GivenRewards(file)


def test_the_same_rewards_pass_and_those_of_others_are_no_difference(given: GivenRewards) -> None:
    given.require("ses_1", [stored(), stored(1.0, source=RewardSource.OPERATOR)])


@pytest.mark.parametrize(
    "found",
    [
        [],
        [stored(100.0)],
        [stored(), stored()],
        [stored(), stored(1.0, "bonus")],
        [stored(name="bonus")],
        [stored(turn=1)],
        [stored(source=RewardSource.OPERATOR)],
        [stored(source=RewardSource.SCORER)],
        [stored(role="worker")],
        [stored(kind=RewardKind.FINDING, mode=FindingMode.WARN)],
    ],
)
def test_another_value_name_place_kind_or_number_of_rewards_is_a_difference(
    given: GivenRewards, found: list[Reward]
) -> None:
    with pytest.raises(RewardsDiffer, match=r"ses_1.*reward=0\.5"):
        given.require("ses_1", found)


def test_a_finding_keeps_what_it_costs(given: GivenRewards) -> None:
    finding = {"session_id": "ses_4", "name": "network", "kind": RewardKind.FINDING}
    given.require("ses_4", [stored(1.0, **finding, mode=FindingMode.ZERO)])
    with pytest.raises(RewardsDiffer, match=r"network=1 \(finding, zero\)"):
        given.require("ses_4", [stored(1.0, **finding, mode=FindingMode.WARN)])


def test_a_session_that_was_given_none_has_none(given: GivenRewards) -> None:
    given.require("ses_2", [])
    with pytest.raises(RewardsDiffer, match="none"):
        given.require("ses_2", [stored()])


def test_nothing_is_known_of_a_session_of_another_run(given: GivenRewards) -> None:
    assert not given.knows("ses_9")
    given.require("ses_9", [stored()])


def test_a_reward_keeps_its_place_and_source(given: GivenRewards) -> None:
    step = stored(1.0, "step", session_id="ses_5", call_id="c", turn=1)
    cost = stored(1.0, "cost", session_id="ses_5", role="worker", source=RewardSource.SCORER)
    given.require("ses_5", [step, cost])
    for moved in (
        [replace(step, call_id="d"), cost],
        [step, replace(cost, role="planner")],
        [step, replace(cost, source=RewardSource.VERIFIER)],
    ):
        with pytest.raises(RewardsDiffer, match="cost=1 of a scorer at worker, step=1 at c"):
            given.require("ses_5", moved)
