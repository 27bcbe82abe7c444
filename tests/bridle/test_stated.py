"""A training run keeps what it trains on."""

from __future__ import annotations

from bridle.reconstruct.rewards import Aggregation
from bridle.reconstruct.samples.rules import DEFAULT_RULES, SampleRules
from bridle.run.training import rules_of, stated
from bridle.store.reading.queries import Reader
from bridle.store.records import CallKind, RunRecord
from bridle.store.writing.writer import Writer
from bridle.trainer.config import AdvantageConfig, GrpoConfig, SampleConfig


def test_a_run_states_its_rules_how_rewards_add_up_and_every_setting(store: str) -> None:
    advantages = AdvantageConfig(reward_weights={"score": 2.0}, reward_turns="mean")
    with Writer(store) as writer, Reader(store) as reader:
        writer.add_sync(RunRecord("run_1", "train", 1.0))
        writer.configure_run("run_1", stated(GrpoConfig(steps=3, advantages=advantages)))
        config = reader.run("run_1").config
    assert SampleRules.from_data(config["samples"]["rules"]) == DEFAULT_RULES
    assert Aggregation.from_data(config["reward"]) == Aggregation({"score": 2.0}, "mean")
    assert config["settings"]["steps"] == 3
    assert config["settings"]["advantages"]["reward_turns"] == "mean"


def test_summaries_are_trained_where_a_run_says_so() -> None:
    assert rules_of(GrpoConfig()) == DEFAULT_RULES
    rules = rules_of(GrpoConfig(samples=SampleConfig(("main", "compaction"))))
    assert rules.kinds == {CallKind.MAIN, CallKind.COMPACTION}
    assert SampleRules.from_data(stated(GrpoConfig())["samples"]["rules"]) == DEFAULT_RULES
