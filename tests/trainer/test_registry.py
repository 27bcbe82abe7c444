"""Advantages, losses and filters that a user adds, by name and as FILE.py:NAME."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import bridle
from bridle.errors import UsageError
from bridle.trainer.batch.filters import filtered
from bridle.trainer.config import AdvantageConfig, FilterConfig, LossConfig
from bridle.trainer.credit import ADVANTAGES, Credit, CreditGroup
from bridle.trainer.filters import FILTERS
from bridle.trainer.losses.losses import LOSSES, Surrogate, policy_loss
from bridle.trainer.losses.terms import TokenTerms
from bridle.trainer.losses.trial import require_loss


@pytest.fixture(autouse=True)
def only_here() -> Iterator[None]:
    """Takes back what a test registers."""
    registries = (ADVANTAGES, LOSSES, FILTERS)
    before = [dict(registry._parts) for registry in registries]
    yield
    for registry, parts in zip(registries, before, strict=True):
        registry._parts = parts


def terms() -> TokenTerms:
    old = torch.tensor([-1.0, -2.0])
    return TokenTerms(
        logprobs=old.clone().requires_grad_(),
        old_logprobs=old,
        behaviour_logprobs=old,
        advantages=torch.tensor([1.0, -1.0]),
        weights=torch.tensor([0.5, 0.5]),
        branches=torch.tensor([0, 1]),
    )


def test_a_registered_advantage_is_computed_for_each_group() -> None:
    @bridle.register_advantage("best")
    def best(group: CreditGroup) -> Credit:
        return group.everywhere(group.rewards - group.rewards.max())

    sample = SimpleNamespace(token_ids=np.zeros(2, np.uint32))
    episode: Any = SimpleNamespace(samples=[sample])
    group = CreditGroup([episode] * 2, np.asarray([1.0, 3.0]), AdvantageConfig())
    found = ADVANTAGES.get("best")(group)
    assert [part.tolist() for (part,) in found] == [[-2.0, -2.0], [0.0, 0.0]]


def test_a_registered_loss_is_weighted_and_has_a_gradient() -> None:
    @bridle.register_loss("reinforce")
    def reinforce(terms: TokenTerms, config: LossConfig) -> Surrogate:
        ones = torch.ones_like(terms.logprobs)
        return Surrogate(-terms.advantages * terms.logprobs, ones, ones.bool())

    given = terms()
    loss, stats = policy_loss(given, LossConfig(name="reinforce"))
    loss.backward()  # type: ignore[no-untyped-call]
    assert given.logprobs.grad is not None
    assert given.logprobs.grad.tolist() == [-0.5, 0.5]
    assert (stats["tokens"], stats["clipped"]) == (2, 2)


def test_a_filter_drops_sessions_under_its_name(make_sample, make_episode, tmp_path: Path) -> None:
    episode = make_episode([make_sample([1, 2, 3, 4], (2, 3))], 1.0)
    bridle.register_filter("never")(lambda episode: False)
    (tmp_path / "trainer.py").write_text("def known(episode): return False\n")
    for name, reason in (("never", "never"), (f"{tmp_path / 'trainer.py'}:known", "known")):
        assert dropped(episode, name) == reason
    bridle.register_filter("always")(lambda episode: True)
    assert dropped(episode, "always") is None


def dropped(episode, name: str) -> str | None:
    return filtered(episode, FilterConfig(extra=(name,))).reason


@pytest.mark.parametrize("name", ["clip", "gspo", "cispo", "aepo", "epo"])
@pytest.mark.parametrize("importance", ["truncate", "mask", "sequence", "none"])
def test_every_loss_of_ours_passes_its_trial(name: str, importance: Any) -> None:
    require_loss(LossConfig(name=name, importance=importance))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("terms.logprobs.sum()", "returns a Tensor, not a Surrogate"),
        ("Surrogate(-terms.logprobs.sum(), ratio, ratio > 1)", "gives its loss as [], not as a"),
        ("Surrogate(-ratio.detach(), ratio, ratio > 1)", "returns a loss without a gradient"),
        ("Surrogate(-ratio, ratio, 0.0)", "gives its clipped as a float, not as a tensor [M]"),
        ("Surrogate(-ratio * terms.values, ratio, ratio > 1)", "raises AttributeError"),
    ],
)
def test_a_loss_of_a_user_that_is_wrong_is_refused_before_a_run_starts(
    tmp_path: Path, body: str, message: str
) -> None:
    file = tmp_path / "mine.py"
    lines = (
        "from bridle.trainer.losses.losses import Surrogate",
        "def mine(terms, config):",
        "    ratio = (terms.logprobs - terms.old_logprobs).exp()",
        f"    return {body}",
    )
    file.write_text("\n".join(lines))
    with pytest.raises(UsageError, match=re.escape(message)) as refused:
        require_loss(LossConfig(name=f"{file}:mine"))
    assert str(refused.value).startswith(f"the loss '{file}:mine' ")
    assert ("mine.py, line 4" in str(refused.value)) == ("raises" in message)


def test_a_correction_and_a_trust_region_are_tried_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def mine(terms, config):\n    return terms.logprobs.mean()\n")
    for part in ("importance", "trust_region"):
        with pytest.raises(UsageError, match=r"gives what it returns as \[\]"):
            require_loss(LossConfig(**{part: f"{file}:mine"}))  # type: ignore[arg-type]
