"""A training run keeps what it trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from sqlalchemy import create_engine, update

from bridle.diagnosis.findings import findings_of_run
from bridle.reconstruct.rewards import VERIFIER_ALONE, Aggregation
from bridle.reconstruct.samples.rules import DEFAULT_RULES, SampleRules
from bridle.run.report import training_figures
from bridle.run.training_plan import TrainingPlan, configured, rules_of, stated
from bridle.store.reading.queries import Reader
from bridle.store.records import CallKind, RunRecord
from bridle.store.schema.database import database_url
from bridle.store.schema.tables import sessions
from bridle.store.writing.writer import Writer
from bridle.trainer.config import (
    AdvantageConfig,
    GrpoConfig,
    LoraConfig,
    OptimizerConfig,
    SampleConfig,
)


def test_a_run_states_its_rules_how_rewards_add_up_and_every_setting(store: str) -> None:
    advantages = AdvantageConfig(reward_weights={"score": 2.0}, reward_turns="mean")
    with Writer(store) as writer, Reader(store) as reader:
        writer.add_sync(RunRecord("run_1", "train", 1.0))
        writer.configure_run("run_1", stated(GrpoConfig(steps=3, advantages=advantages)))
        config = reader.run("run_1").config
    assert SampleRules.from_data(config["samples"]["rules"]) == DEFAULT_RULES
    assert Aggregation.from_data(config["reward"]) == Aggregation(
        {"score": 2.0}, "mean", VERIFIER_ALONE
    )
    assert config["settings"]["steps"] == 3
    assert config["settings"]["advantages"]["reward_turns"] == "mean"


@pytest.mark.parametrize(("rate", "noted"), [("auto", False), (1e-6, True)])
def test_a_run_keeps_its_rate_as_a_number_and_a_note_if_it_moves_nothing(
    store: str, tmp_path: Path, rate: float | Literal["auto"], noted: bool
) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 2048}')
    config = GrpoConfig(lora=LoraConfig(rank=8), optimizer=OptimizerConfig(learning_rate=rate))
    plan = TrainingPlan(tmp_path, tmp_path, store, "run_1", config)
    with Writer(store) as writer, Reader(store) as reader:
        writer.add_sync(RunRecord("run_1", "train", 1.0))
        writer.configure_run("run_1", configured(plan))
        kept = reader.run("run_1").config["settings"]["optimizer"]["learning_rate"]
        found = {one.name: one for one in findings_of_run(reader, "run_1")}
    assert kept == pytest.approx(1e-5 if rate == "auto" else rate)
    assert ("unusual_learning_rate" in found) is noted
    if noted:
        assert "by a factor of 10, and will hardly" in found["unusual_learning_rate"].evidence


def test_summaries_are_trained_where_a_run_says_so() -> None:
    assert rules_of(GrpoConfig()) == DEFAULT_RULES
    rules = rules_of(GrpoConfig(samples=SampleConfig(("main", "compaction"))))
    assert rules.kinds == {CallKind.MAIN, CallKind.COMPACTION}
    assert SampleRules.from_data(stated(GrpoConfig())["samples"]["rules"]) == DEFAULT_RULES


@pytest.mark.parametrize(("kinds", "rows"), [(("main",), 1.0), (("side",), 0.0)])
def test_a_report_counts_rows_by_the_rules_of_its_run(
    store: str, recorded: str, kinds: tuple[str, ...], rows: float
) -> None:
    with Writer(store) as writer:
        writer.add_sync(RunRecord("run_1", "train", 1.0))
        writer.configure_run("run_1", stated(GrpoConfig(samples=SampleConfig(kinds))))
    with create_engine(database_url(store)).begin() as connection:
        connection.execute(update(sessions).values(run_id="run_1", sealed_at=2.0))
    with Reader(store) as reader:
        assert [session.name for session in reader.sessions(run="run_1")] == [recorded]
        assert training_figures(reader, "run_1")["rows_per_session"] == rows
