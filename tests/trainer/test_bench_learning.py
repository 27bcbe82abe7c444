"""``bridle bench learning``: tasks made by rule, the trainer's own parts, and expectations."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from bridle.bench import learning_page
from bridle.bench.collect import CollectSettings
from bridle.bench.commands import app
from bridle.recipes.learning import runs
from bridle.recipes.learning.methods import METHODS, method
from bridle.recipes.learning.runs import (
    LearningFigures,
    LearningSettings,
    compared,
    judged,
    sessions_to_goal,
)
from bridle.recipes.learning.scenarios import (
    ALSO,
    DEFAULT,
    EXPECTATIONS,
    SCENARIOS,
    Expectation,
    methods_of,
    scenario,
)
from bridle.recipes.learning.world import ROLES, World, episode, hinted_gaps, play, rewards_of
from bridle.store.records import CallKind
from bridle.trainer.batch.prepare import prepare
from bridle.trainer.config import AdvantageConfig, GrpoConfig, SampleConfig

EASY = World("easy", "", places=2, ways=3, steps=4, rate=0.4, most=60)
CERTAIN = 50.0


def sure(world: World, right: np.ndarray[tuple[int], np.dtype[np.int64]], sign: float = 1.0):
    """Return the scores of a policy that always, or never, chooses the right way."""
    scores = np.full((world.rows, world.ways), -sign * CERTAIN)
    scores[np.arange(world.rows), right] = sign * CERTAIN
    return scores


def test_the_default_learns_and_a_policy_that_is_not_trained_does_not() -> None:
    reached = sessions_to_goal(EASY, GrpoConfig(), 0)
    assert reached is not None
    assert reached <= EASY.most * 16
    assert sessions_to_goal(replace(EASY, rate=0.0, most=6), GrpoConfig(), 0) is None


@pytest.mark.parametrize("world", SCENARIOS, ids=lambda one: one.name)
def test_a_scenario_has_sessions_whose_tokens_add_up(world: World) -> None:
    rng = np.random.default_rng(0)
    right = rng.integers(0, world.ways, world.rows)
    scores = np.log(np.full((world.rows, world.ways), 1 / world.ways))
    played = play(world, scores, right, 8, rng)
    kinds = SampleConfig().kinds
    episodes = [episode(world, f"s{n}", "g", one, 0, kinds) for n, one in enumerate(played)]
    step = prepare(episodes, 0, GrpoConfig())
    assert step.account.balanced
    for one in episodes:
        assert sum(sample.weight for sample in one.samples) == pytest.approx(1.0)
        calls = [call for sample in one.samples for call in sample.call_ids]
        assert len(calls) == len(set(calls))
        branches = 1 + (world.summary_at is not None and len(calls) > world.summary_at)
        assert len(one.samples) == (branches if world.history else len(calls))


def test_a_session_is_rewarded_when_it_comes_to_the_goal_which_ends_it() -> None:
    world, rng = scenario("plain"), np.random.default_rng(0)
    right = np.arange(world.rows) % world.ways
    for one in play(world, sure(world, right), right, 16, rng):
        assert one.solved
        assert [reward.value for reward in rewards_of(world, "s", one)] == [1.0]
        assert [step.seen for step in one.steps] == [*range(one.steps[0].seen, world.places)]
    for one in play(world, sure(world, right, -1.0), right, 16, rng):
        assert not one.solved
        assert len(one.steps) == world.steps


def test_a_wrong_summary_starts_a_session_over_and_only_a_policy_that_trains_them_learns_it() -> (
    None
):
    world, rng = scenario("summary"), np.random.default_rng(0)
    right = np.zeros(world.rows, np.int64)
    scores = sure(world, right)
    scores[world.summary] = np.roll(scores[world.summary], 1)
    for one in play(world, scores, right, 16, rng):
        kinds = [step.kind for step in one.steps]
        if CallKind.COMPACTION in kinds:
            after = kinds.index(CallKind.COMPACTION) + 1
            assert one.steps[after].seen == 0
    tokens = episode(world, "s", "g", play(world, scores, right, 1, rng)[0], 0).conservation
    assert tokens.masked == {} or tokens.masked == {"kind": 1}


def test_a_planner_and_a_worker_get_credit_of_their_own_sign() -> None:
    """Four sessions: both right, the planner alone, the worker alone, neither."""
    world, rng = scenario("roles"), np.random.default_rng(0)
    right = np.zeros(world.rows, np.int64)
    played = play(world, sure(world, right), right, 4, rng)
    wanted = [(True, True), (True, False), (False, True), (False, False)]
    for one, marks in zip(played, wanted, strict=True):
        for step, mark in zip(one.steps, marks, strict=True):
            step.right = mark
    episodes = [episode(world, f"s{n}", "g", one, 0) for n, one in enumerate(played)]
    config = GrpoConfig(advantages=AdvantageConfig("per_role"))
    for item in prepare(episodes, 0, config).items:
        number = int(item.sample.session_id[1:])
        for place, role in enumerate(item.sample.roles):
            credit = float(item.credit[item.sample.calls == place][0])
            assert np.sign(credit) == (1 if wanted[number][ROLES.index(role or "")] else -1)


NEEDED: dict[str, list[int | None]] = {
    DEFAULT: [100, 200, None],
    "gigpo": [100, 90, 400],
    "mean": [100, None, None],
    "grpo": [100, 200, None],
}


def test_methods_are_compared_with_the_first_by_medians() -> None:
    found = compared("plain", NEEDED)
    assert [(one.name, one.sessions, one.ratio) for one in found] == [
        (DEFAULT, 200, 1.0),
        ("gigpo", 100, 0.5),
        ("mean", None, None),
        ("grpo", 200, 1.0),
    ]
    assert [one.name for one in found if one.differs] == ["gigpo", "mean"]


def test_a_method_learns_at_the_rate_that_is_best_on_other_seeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[float, int]] = []

    def needed(world: World, config: GrpoConfig, seed: int, settings: LearningSettings) -> int:
        asked.append((world.rate, seed))
        return {0.5: 100, 0.7: 50, 0.2: 70}[world.rate] + seed

    monkeypatch.setattr(runs, "sessions_to_goal", needed)
    settings = LearningSettings(seeds=2, first_seed=3)
    world = replace(SCENARIOS[0], rates=(0.5, 0.7))
    (one,) = runs.bench_learning(world, [DEFAULT], settings, lambda _line: None)
    assert one.by_seed == [53, 54]
    assert {seed for rate, seed in asked if rate == 0.5} == {5, 6, 7, 8, 9}
    asked.clear()
    runs.bench_learning(SCENARIOS[0], [DEFAULT], settings, lambda _line: None)
    assert asked == [(0.2, 3), (0.2, 4)]


def test_an_expectation_can_be_missed() -> None:
    found = compared("plain", NEEDED)
    claims = [
        Expectation("gigpo", "plain", "", at_most=0.75),
        Expectation("gigpo", "plain", "", at_most=0.4),
        Expectation("mean", "plain", "", at_most=2.0),
        Expectation("mean", "plain", "", at_least=1.0),
        Expectation("gigpo", "plain", "", at_most=1.0, against="mean"),
        Expectation("critic", "plain", ""),
    ]
    results = judged(found, claims)
    assert [one.met for one in results] == [True, False, False, True, True]
    assert [one.ratio for one in results] == [0.5, 0.5, None, None, 0.0]


def test_every_method_that_can_be_run_has_a_scenario() -> None:
    run = {name for world in SCENARIOS for name in methods_of(world.name)}
    same = {one.name for one in METHODS if one.configured(GrpoConfig()) == GrpoConfig()}
    excused = {one.name for one in METHODS if one.not_compared}
    assert {one.name for one in METHODS} - run - same - excused == {"no bias"}
    assert not (run - {DEFAULT}) & same
    assert {one.scenario for one in EXPECTATIONS} | {n for own in ALSO.values() for n in own} == {
        one.name for one in SCENARIOS
    }


def test_the_page_has_each_method_each_seed_and_whether_its_claim_is_met(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = CollectSettings(slots=4, group_size=2, groups_per_step=2, steps=4, median_s=0.01)
    monkeypatch.setattr(learning_page, "SLOW", small)
    bounds, refills = learning_page.measured()
    assert [each.max_staleness for each in bounds] == [0, 2]
    assert refills[0].live < refills[1].live
    found = [*compared("plain", NEEDED), *_history()]
    text = learning_page.page(found, bounds, refills, LearningSettings(seeds=3))
    assert "3 of 4 rows differ from their scenario's default; equal: grpo (plain)." in text
    assert "| gigpo | 100 | 100, 90, 400 | 0.50 |" in text
    assert "| mean | not reached | 100, not reached, not reached |  |" in text
    assert "≤ 1.1 and ≥ 0.9 of default's | not reached | **missed** |" in text
    assert "≤ 0.75 of default's | 0.50 | met |" in text
    assert f"| 8 | {refills[1].live:.2f} |" in text


def _history() -> list[LearningFigures]:
    return compared("history", {DEFAULT: [100], "gigpo": [50]})


def test_the_command_reports_figures_expectations_and_differences() -> None:
    asked = ["learning", "--scenario", "plain", "--case", "mean", "--json"]
    result = CliRunner().invoke(app, [*asked, "--seeds", "1", "--first-seed", "1"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [one["name"] for one in found["figures"]] == [DEFAULT, "mean"]
    assert [one["method"] for one in found["expectations"]] == ["mean"]
    assert [one["differs"] for one in found["figures"]] == [False, True]
    refused = CliRunner().invoke(app, ["learning", "--case", "nothing"])
    assert refused.exit_code == 2


def test_a_teacher_with_a_hint_is_right_as_often_as_the_world_states() -> None:
    world = scenario("hints")
    rng = np.random.default_rng(0)
    right = rng.integers(0, world.ways, world.rows)
    scores = np.full((world.rows, world.ways), -np.log(world.ways))
    (played,) = play(world, scores, right, 1, rng)
    (sample,) = episode(world, "s", "g", played, 0).samples
    (gaps,) = hinted_gaps(world, right, [sample])
    teacher = np.exp(gaps[sample.mask] + sample.logprobs[sample.mask])
    others = (1 - world.hint) / (world.ways - 1)
    expected = [world.hint if step.right else others for step in played.steps]
    assert teacher.tolist() == pytest.approx(expected, rel=1e-5)
    assert len(set(expected)) == 2
    assert not gaps[~sample.mask].any()


def test_a_method_with_a_teacher_learns_from_its_hints() -> None:
    world = replace(EASY, hint=0.8)
    alone = method("teacher with a hint, alone").configured(GrpoConfig())
    reached = sessions_to_goal(world, alone, 0)
    assert reached is not None
    assert reached <= EASY.most * 16
    assert sessions_to_goal(replace(world, hint=1 / 3, most=20), alone, 0) is None
