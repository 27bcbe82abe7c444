"""The recipes of docs/extend.md: their code runs. The files that CONTRIBUTING.md names exist."""

from __future__ import annotations

import asyncio
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bridle.harnesses.adapters.base import Access
from bridle.harnesses.client import Session
from bridle.harnesses.sandboxes import ProcessSandbox
from bridle.harnesses.sandboxes.folder import place_in
from bridle.harnesses.tasks.task import Task
from bridle.trainer.config import AdvantageConfig, LossConfig
from bridle.trainer.credit import ADVANTAGES, CreditGroup, estimated
from bridle.trainer.losses.losses import LOSSES, policy_loss
from bridle.trainer.losses.terms import TokenTerms

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
RECIPES = (ROOT / "docs" / "extend.md").read_text()


def block(title: str, language: str = "python") -> str:
    """The one block in a language under the heading ``title``."""
    section = RECIPES.split(f"## {title}\n")[1].split("\n##")[0]
    (found,) = re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
    return str(found)


def recipe(title: str) -> dict[str, Any]:
    """Return the names that the Python block under the heading ``title`` defines."""
    names: dict[str, Any] = {"__name__": "recipe"}
    exec(compile(block(title), title, "exec", dont_inherit=True), names)  # noqa: S102 - our page
    return names


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (ADVANTAGES, LOSSES):
        monkeypatch.setattr(registry, "_parts", dict(registry._parts))


@pytest.mark.usefixtures("_registered")
def test_an_advantage_is_found_by_the_name_that_it_registers() -> None:
    recipe("An advantage")
    sample = SimpleNamespace(token_ids=np.zeros(1, np.uint32))
    episode: Any = SimpleNamespace(samples=[sample])
    group = CreditGroup([episode] * 3, np.array([0.0, 1.0, 5.0]), AdvantageConfig())
    found = ADVANTAGES.get("median")(group)
    assert [part.tolist() for (part,) in found] == [[-1.0], [0.0], [4.0]]


def test_an_anchor_and_a_filter_are_functions_of_what_their_page_says() -> None:
    asked, late = recipe("An anchor")["asked"], recipe("A filter")["late"]
    turns = [SimpleNamespace(call_id=str(number), observation="seen") for number in range(10)]
    assert late(SimpleNamespace(turns=turns)) == ["8", "9"]
    assert asked(None, SimpleNamespace(turn=turns[0])) == "seen"
    assert asked(None, SimpleNamespace(turn=None)) is None


@pytest.mark.usefixtures("_registered")
def test_a_loss_is_found_by_the_name_that_it_registers_and_has_a_gradient() -> None:
    recipe("A loss")
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    same = logprobs.detach()
    terms = TokenTerms(
        logprobs, same, same, torch.tensor([1.0, -3.0]), torch.ones(2), torch.zeros(2).long()
    )
    loss, stats = policy_loss(terms, LossConfig(name="reinforce"))
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.0, 3.0]
    assert stats["tokens"] == 2


def test_an_export_gives_rows() -> None:
    message = {"role": "user", "content": "two and two?"}
    exported = SimpleNamespace(
        id="one", messages=[SimpleNamespace(message=message)], require_messages=lambda: None
    )
    rows = list(recipe("An export")["plain_rows"](exported))
    assert rows == [{"id": "one", "text": "user: two and two?"}]


def test_an_adapter_plans_a_launch(tmp_path: Path) -> None:
    parrot = recipe("An adapter")["Parrot"]()
    session = Session("ses_1", "key", {}, {"OPENAI_API_KEY": "key"})
    plan = parrot.plan(Task("one", "hello"), Access(session), place_in(tmp_path))
    assert plan.argv == ("echo", "hello")
    assert plan.environment["OPENAI_API_KEY"] == "key"
    finished = SimpleNamespace(stdout=SimpleNamespace(tail="hello\n"))
    assert asyncio.run(parrot.answer(finished, ProcessSandbox(tmp_path))) == "hello"


def test_an_advantage_has_the_options_that_its_configuration_states(tmp_path: Path) -> None:
    (tmp_path / "my_credit.py").write_text(block("Bring options"))
    config = tomllib.loads(block("Bring options", "toml"))["training"]["advantages"]
    config["baseline"] = f"{tmp_path}/{config['baseline']}"
    sample = SimpleNamespace(token_ids=np.zeros(1, np.uint32))
    episode: Any = SimpleNamespace(samples=[sample])
    group = CreditGroup([episode] * 2, np.array([0.0, 4.0]), AdvantageConfig(**config))
    assert [part.tolist() for (part,) in estimated(group)] == [[-1.0], [3.0]]


def test_the_files_and_targets_that_it_names_exist() -> None:
    named = re.findall(r"`((?:[\w.]+/)+[\w.]*)`", PAGE)
    assert len(named) > 30
    assert [path for path in named if not (ROOT / path).exists()] == []
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"`make ([\w-]+)`", PAGE)
    assert [target for target in targets if f"\n{target}:" not in makefile] == []
