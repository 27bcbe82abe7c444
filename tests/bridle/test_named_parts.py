"""Harnesses, sandboxes, verifiers, fleets and task sources that a user names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bridle.extras import MissingExtra
from bridle.harnesses.adapters.codex import Codex
from bridle.harnesses.fleet import LocalFleet
from bridle.harnesses.sandboxes import ForkedProvider, ProcessProvider
from bridle.harnesses.tasks import tasks_from
from bridle.harnesses.tasks.sources import SCHEMES
from bridle.harnesses.tasks.task import Task
from bridle.harnesses.verifiers import RegexAnswer, SeparateFunction
from bridle.registry import UnknownOption, UnknownPart
from bridle.run.agents import UnknownAgent, agent, verifier
from bridle.run.fleets import NamedParts, fleet_of
from bridle.run.parts import open_sets
from bridle.trainer.config import AdvantageConfig, FilterConfig, GrpoConfig, LossConfig

MINE = """
from dataclasses import dataclass

from bridle.harnesses.sandboxes import ForkedProvider, ProcessProvider
from bridle.harnesses.verifiers import ExactAnswer

@dataclass(frozen=True)
class Own:
    name: str = "own"
    def sandboxes(self):
        return ForkedProvider()

@dataclass(frozen=True)
class Answer(ExactAnswer):
    key: str = "mine"

@dataclass(frozen=True)
class Sizes:
    size: int = 1

def sandbox(adapter, options: Sizes = Sizes()):
    provider = ProcessProvider()
    provider.made_for = adapter.name, options.size
    return provider

def fleet(asked):
    asked.local.asked = asked
    return asked.local

nothing = None
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return str(file)


def test_a_harness_of_a_file_brings_its_sandboxes_and_options(mine: str) -> None:
    adapter, sandboxes = agent(f"{mine}:Own", options={"Own": {"name": "renamed"}})
    assert (adapter.name, type(sandboxes)) == ("renamed", ForkedProvider)
    codex, sandboxes = agent("codex", options={"codex": {"context_window": 9000}})
    assert codex == Codex(context_window=9000)
    assert isinstance(sandboxes, ProcessProvider)
    with pytest.raises(UnknownAgent, match=r"'codeks' is not a Python script.*of codex, claude-co"):
        agent("codeks")


def test_a_sandbox_of_a_file_is_made_for_the_adapter(mine: str) -> None:
    _, sandboxes = agent("codex", f"{mine}:sandbox", options={"sandbox": {"size": 3}})
    assert sandboxes.made_for == ("codex", 3)  # type: ignore[attr-defined]
    with pytest.raises(
        UnknownPart, match=r"no sandbox 'conteiner': name FILE.py:NAME or one of pr"
    ):
        agent("codex", "conteiner")
    with pytest.raises(UnknownAgent, match="a forked container runs mini-swe-agent, not codex"):
        agent("codex", "container-forked")


def test_a_verifier_is_a_class_that_is_made_or_a_function(mine: str) -> None:
    assert verifier("regex", {"regex": {"pattern": "^x"}}) == RegexAnswer("^x")
    assert verifier(f"{mine}:Answer").key == "mine"  # type: ignore[attr-defined]
    assert isinstance(verifier(f"{mine}:fleet"), SeparateFunction)
    with pytest.raises(UnknownAgent, match=r"mine\.py:nothing is not a function"):
        verifier(f"{mine}:nothing")
    with pytest.raises(UnknownOption, match="the verifier 'exact' has no option 'keys', but key"):
        verifier("exact", {"exact": {"keys": "x"}})


def test_a_fleet_of_a_file_gets_the_parts_and_their_names(mine: str, tmp_path: Path) -> None:
    options = {"exact": {"key": "x"}}
    adapter, fleet = fleet_of(f"{mine}:fleet", "echo a:b {prompt}", "exact", [], options=options)
    assert isinstance(fleet, LocalFleet)
    asked = fleet.asked  # type: ignore[attr-defined]
    assert adapter.name == "echo"
    assert (asked.parts.agent, asked.parts.options) == ("echo a:b {prompt}", options)
    assert hash(asked.parts) == hash(asked.parts)
    made = NamedParts("codex", None, "exact", tmp_path / "gone", options)()
    assert made.verifier.key == "x"  # type: ignore[attr-defined]
    with pytest.raises(UnknownPart, match="options are for 'exakt', which is none of exact, local"):
        fleet_of("local", "echo {prompt}", "exact", [], options={"exakt": {"key": "x"}})
    with pytest.raises(UnknownPart, match="no fleet 'slurm'"):
        fleet_of("slurm", "echo {prompt}", "exact", [])


def test_a_fleet_whose_package_is_missing_says_what_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "bridle.harnesses.fleet.ray", None)
    with pytest.raises(MissingExtra, match=r"Ray is missing: pip install.*\[ray\]"):
        fleet_of("ray:auto", "echo {prompt}", "exact", [])


def test_a_scheme_of_tasks_is_a_function_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def words(reference: str) -> list[Task]:
        return [Task(word, word) for word in reference.split(",")]

    monkeypatch.setitem(SCHEMES._parts, "words", words)
    assert [task.id for task in tasks_from("words:a,b:c")] == ["a", "b:c"]


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            GrpoConfig(advantages=AdvantageConfig("gigpo", options={"gigpo": {"gamma": 1}})),
            "the advantage 'gigpo' has no option 'gamma', but discount, step_weight",
        ),
        (
            GrpoConfig(advantages=AdvantageConfig(options={"gigpoo": {"discount": 1}})),
            "options are for 'gigpoo', which is none of grpo",
        ),
        (
            GrpoConfig(loss=LossConfig(options={"clip": {"low": 1}})),
            "the loss 'clip' has no option 'low', and none at all",
        ),
        (
            GrpoConfig(filters=FilterConfig(extra=("truncated",), options={"cut": {"x": 1}})),
            "options are for 'cut', which is none of truncated",
        ),
    ],
)
def test_options_of_a_run_are_refused_before_it_starts(config: GrpoConfig, problem: str) -> None:
    from bridle.run.training import require_parts

    with pytest.raises((UnknownOption, UnknownPart), match=problem):
        require_parts(config)


def test_every_open_set_is_listed_with_the_options_of_its_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "bridle.trainer.losses.losses", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    sets = open_sets()
    assert sets["bridle.advantages"]["gigpo"]["options"] == {"discount": 1.0, "step_weight": 1.0}
    assert sets["bridle.adapters"]["codex"]["options"]["context_window"] == 131_072
    assert sets["bridle.exports"]["tokens"] == {"options": {}}
    assert "cannot import" in sets["bridle.trainer.losses.losses:LOSSES"]["error"]
