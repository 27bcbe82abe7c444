"""Parts of credit and filters that a user adds are tried on made-up sessions before a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bridle.errors import UsageError
from bridle.registry import PartFailed
from bridle.run.training import require_parts
from bridle.trainer.batch.trial import require_credit_and_filters
from bridle.trainer.config import (
    AdvantageConfig,
    DistillationConfig,
    FilterConfig,
    GrpoConfig,
    LossConfig,
)
from bridle.trainer.credit import ADVANTAGES
from bridle.trainer.credit.anchors import ANCHORS
from bridle.trainer.credit.privileged import CONTEXTS
from bridle.trainer.filters import FILTERS
from bridle.trainer.losses.trial import require_loss


def written(folder: Path, signature: str, body: str) -> str:
    file = folder / "mine.py"
    file.write_text(f"import numpy as np\n\n\ndef mine({signature}):\n    {body}\n")
    return f"{file}:mine"


def with_advantage(name: str) -> GrpoConfig:
    return GrpoConfig(advantages=AdvantageConfig(name))


def with_filter(name: str) -> GrpoConfig:
    return GrpoConfig(filters=FilterConfig(extra=(name,)))


def with_context(name: str) -> GrpoConfig:
    return GrpoConfig(distillation=DistillationConfig(teacher="ema", context=name))


@pytest.mark.parametrize("payload", [None, {}, {"answer": "7", "hint": "It is 7."}])
def test_every_part_of_ours_passes_its_trial(payload: dict[str, Any] | None) -> None:
    for name in ADVANTAGES.names():
        for anchor in ANCHORS.names():
            config = GrpoConfig(advantages=AdvantageConfig(name, anchor=anchor))
            require_credit_and_filters(config, payload)
    require_credit_and_filters(
        GrpoConfig(filters=FilterConfig(extra=tuple(FILTERS.names()))), payload
    )
    for name in CONTEXTS.names():
        require_credit_and_filters(with_context(name), payload)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return group.rewards", "returns an array [3] for three sessions of one sample"),
        ("return [1.0, 2.0, 3.0]", "returns a list that begins with 1.0 for three sessions"),
        ("return group.everywhere(group.rewards)[:2]", "a list that begins with a list that"),
        ("return group.everywhere(group.rewards + np.inf)", "returns advantages that are infinite"),
        ("return group.everywhere(group.rewards * np.nan)", "returns NaN for every token"),
        ("return group.by_steps(group.rewards)", "raises AttributeError: 'CreditGroup' object has"),
        ("return group.score([])", "raises UsageError: "),
        ("return group.episodes[0].payload['answer']", "raises KeyError: 'answer'"),
    ],
)
def test_an_advantage_that_is_wrong_is_refused_before_a_run_starts(
    tmp_path: Path, body: str, message: str
) -> None:
    name = written(tmp_path, "group", body)
    with pytest.raises(PartFailed, match=re.escape(message)) as refused:
        require_credit_and_filters(with_advantage(name), {})
    assert str(refused.value).startswith(f"the advantage '{name}' ")
    assert ("mine.py, line 5" in str(refused.value)) == message.startswith("raises")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [step.role]", "returns a list, which is no key"),
        ("return step.role, [step.call_id]", "returns a tuple, which is no key"),
        ("return step.state", "raises AttributeError"),
    ],
)
def test_an_anchor_that_is_wrong_is_refused_before_a_run_starts(
    tmp_path: Path, body: str, message: str
) -> None:
    name = written(tmp_path, "group, step", body)
    config = GrpoConfig(advantages=AdvantageConfig("gigpo", anchor=name))
    with pytest.raises(PartFailed, match=re.escape(message)) as refused:
        require_credit_and_filters(config, {})
    assert str(refused.value).startswith(f"the anchor '{name}' ")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("pass", "returned no decision"),
        ("return [np.zeros(3, bool)]", "it has no array of each sample's length"),
        ("return episode.calls[0]", "raises AttributeError"),
    ],
)
def test_a_filter_that_is_wrong_is_refused_before_a_run_starts(
    tmp_path: Path, body: str, message: str
) -> None:
    name = written(tmp_path, "episode", body)
    with pytest.raises(PartFailed, match=re.escape(message)) as refused:
        require_credit_and_filters(with_filter(name), {})
    assert str(refused.value).startswith(f"the filter '{name}' ")


def test_an_assertion_about_the_run_s_own_sessions_refuses_nothing(tmp_path: Path) -> None:
    name = written(tmp_path, "group", "assert len(group.episodes) == 8")
    require_credit_and_filters(with_advantage(name), {})
    (tmp_path / "loss").mkdir()
    loss = written(tmp_path / "loss", "terms, config", "assert len(terms.weights) > 100")
    require_loss(LossConfig(name=loss))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 3", "returns 3: return text"),
        ("return attempt.episode.payload['hint']", "raises KeyError: 'hint'"),
    ],
)
def test_a_context_that_is_wrong_is_refused_before_a_run_starts(
    tmp_path: Path, body: str, message: str
) -> None:
    name = written(tmp_path, "attempt", body)
    with pytest.raises(PartFailed, match=re.escape(message)):
        require_credit_and_filters(with_context(name), {})


@pytest.mark.parametrize(
    "reads",
    ["['answer']", ".get('answer').lower()", ".items()", ".keys() & {'answer'}"],
)
def test_a_part_that_reads_an_unknown_payload_is_not_judged(tmp_path: Path, reads: str) -> None:
    name = written(tmp_path, "episode", f"return bool(episode.payload{reads})")
    require_credit_and_filters(with_filter(name), None)
    require_credit_and_filters(with_filter(name), {"answer": "Seven"})


def test_a_run_tries_its_parts_with_the_rest(tmp_path: Path) -> None:
    name = written(tmp_path, "group", "return group.rewards.mean()")
    with pytest.raises(UsageError, match=r"the advantage '.*mine' returns .*for three"):
        require_parts(with_advantage(name))
