"""Pairs and labels from groups: which replies are compared, and that TRL trains them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from transformers import AutoTokenizer

from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.reconstruct.exports.formats import export
from bridle.reconstruct.exports.selection import ExportReport, Selection
from bridle.store.reward import Reward, RewardSource
from bridle.trainer.config import OptimizerConfig, SftConfig
from bridle.trainer.policy.model import load_policy
from bridle.trainer.sft.preference import ends_of_turn, train_preferences, up_to_end

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ASKED = {"role": "user", "content": "Where is the lamp?"}


@pytest.fixture
def play(record: Callable[..., Any], writer: Any) -> Callable[..., Any]:
    """Records a session that looks at a place, and then answers."""

    def play(number: float | None, place: str, answer: str, group: str | None = "g") -> Any:
        session = record(group_id=group, outcome="completed", sealed_at=9.0)
        function = {"name": "look", "arguments": json.dumps({"at": place})}
        call = {"id": f"c-{session.id}", "type": "function", "function": function}
        first = session.call(
            [1, 2],
            [3, 4],
            conversation={"tail": [ASKED], "tools": [TOOL], "lineage": {"base": None}},
            message={"role": "assistant", "content": "", "tool_calls": [call]},
        )
        seen = {"role": "tool", "tool_call_id": call["id"], "content": "a shelf"}
        session.call(
            [1, 2, 3, 4, 5],
            [6],
            parent=first,
            conversation={"tail": [seen], "lineage": {"base": first}},
            message={"role": "assistant", "content": answer},
        )
        if number is not None:
            given = Reward(session.id, "reward", number, 1.0, source=RewardSource.VERIFIER)
            writer.add_sync(given)
        return session

    return play


def rows(reader: Any, tmp_path: Path, form: str, **selected: Any) -> tuple[list[Any], ExportReport]:
    path = tmp_path / "rows.jsonl"
    report = export(reader, path, form, Selection(**selected))
    return [json.loads(line) for line in path.read_text().splitlines()], report


def called(message: Any) -> str:
    (call,) = message["tool_calls"]
    return str(call["function"]["arguments"]["at"])


def test_replies_are_compared_where_conversations_differ(
    reader: Any, play: Callable[..., Any], tmp_path: Path
) -> None:
    play(1.0, "desk", "On the desk.")
    play(0.0, "desk", "Nowhere.")
    play(0.0, "bed", "In the bed.")
    found, report = rows(reader, tmp_path, "preference")
    at_start, at_desk = found
    assert [one["role"] for one in at_start["prompt"]] == ["user"]
    assert called(*at_start["chosen"]) == "desk"
    assert called(*at_start["rejected"]) == "bed"
    assert [one["role"] for one in at_desk["prompt"]] == ["user", "assistant", "tool"]
    assert [one["content"] for one in at_desk["chosen"]] == ["On the desk."]
    assert [one["content"] for one in at_desk["rejected"]] == ["Nowhere."]
    assert all(json.loads(one["tools"]) == [TOOL] for one in found)
    assert (report.sessions, report.rows, report.tokens) == (3, 2, 2 + 2 + 1 + 1)
    assert report.untrained == {"not_compared": 2 + 1}


def test_sessions_without_reward_other_groups_and_equal_numbers_give_nothing(
    reader: Any, play: Callable[..., Any], tmp_path: Path
) -> None:
    play(1.0, "desk", "On the desk.", group="a")
    play(0.0, "bed", "In the bed.", group="b")
    play(1.0, "bed", "In the bed.", group="a")
    play(None, "floor", "On the floor.", group="a")
    for form in ("preference", "preference-labels"):
        found, report = rows(reader, tmp_path, form)
        assert found == []
        assert report.left_out == {"session_without_reward": 1}
        assert report.untrained == {"not_compared": 12}


def test_labels_compare_a_session_with_the_mean_of_its_group(
    reader: Any, play: Callable[..., Any], tmp_path: Path
) -> None:
    for number, place in ((1.0, "desk"), (0.5, "bed"), (0.0, "floor")):
        play(number, place, f"On the {place}.")
    found, report = rows(reader, tmp_path, "preference-labels")
    labels = [(one["label"], len(one["prompt"])) for one in found]
    assert labels == [(True, 1), (True, 3), (False, 1), (False, 3)]
    assert report.untrained == {"not_compared": 3}
    only, _ = rows(reader, tmp_path, "preference-labels", min_reward=0.5)
    assert [one["label"] for one in only] == [True, True, False, False]


def test_equal_pairs_are_written_once_if_asked(
    reader: Any, play: Callable[..., Any], tmp_path: Path
) -> None:
    for group in "ab":
        play(1.0, "desk", "On the desk.", group)
        play(0.0, "desk", "Nowhere.", group)
    assert len(rows(reader, tmp_path, "preference")[0]) == 2
    found, report = rows(reader, tmp_path, "preference", deduplicate=True)
    assert (len(found), report.left_out) == (1, {"duplicate": 1})


@pytest.mark.parametrize(
    ("pairing", "expected"),
    [
        ("replies", [("desk", "floor")]),
        ("sessions", [("desk", "floor"), ("desk", "floor"), ("desk", "bed")]),
        ("all", [("desk", "bed"), ("desk", "floor"), ("bed", "floor")]),
    ],
)
def test_pairs_of_replies_of_sessions_and_all_pairs(
    reader: Any,
    play: Callable[..., Any],
    tmp_path: Path,
    pairing: Any,
    expected: list[tuple[str, str]],
) -> None:
    for number, place in ((1.0, "desk"), (1.0, "desk"), (1.0, "desk"), (0.5, "bed")):
        play(number, place, "There.")
    for _ in range(2):
        play(0.0, "floor", "There.")
    found, report = rows(reader, tmp_path, "preference", pairs=pairing)
    at_start = [one for one in found if len(one["prompt"]) == 1]
    assert [(called(*one["chosen"]), called(*one["rejected"])) for one in at_start] == expected
    assert report.rows == len(found)


@pytest.mark.parametrize(("loss", "form"), [("dpo", "preference"), ("kto", "preference-labels")])
def test_trl_trains_them_unchanged(
    reader: Any,
    play: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    loss: Any,
    form: str,
) -> None:
    torch.set_num_threads(1)
    policy = tmp_path / "policy"
    size = train_tokenizer(policy, ["Where is the lamp? On the desk."] * 20, vocab_size=320)
    shape = TinyShape(hidden=32, layers=1, heads=1, kv_heads=1, intermediate=64, context=512)
    make_policy(policy, shape, vocab_size=size, seed=3)
    play(1.0, "desk", "On the desk.")
    play(0.0, "desk", "Nowhere.")
    found, _ = rows(reader, tmp_path, form)
    config = SftConfig(
        loss=loss, epochs=3, batch_size=4, optimizer=OptimizerConfig(learning_rate=0.01)
    )
    trainer = {"dpo": trl.DPOTrainer, "kto": trl.KTOTrainer}[loss]
    trained: list[dict[str, Any]] = []
    train = trainer.train

    def watched(self: Any) -> Any:
        trained.extend(self.train_dataset)
        return train(self)

    monkeypatch.setattr(trainer, "train", watched)
    figures = train_preferences(policy, found, tmp_path / "tuned", config)
    assert figures.updates == 3
    assert figures.last_loss < figures.first_loss
    before, after = load_policy(policy), load_policy(tmp_path / "tuned")
    moved = [
        not torch.equal(one, other)
        for one, other in zip(before.parameters(), after.parameters(), strict=True)
    ]
    assert all(moved)
    end = AutoTokenizer.from_pretrained(policy).eos_token_id
    sides = ("chosen_ids", "rejected_ids", "completion_ids", "KL_completion_ids")
    replies = [row[side] for row in trained for side in sides if side in row]
    assert replies
    assert all(one[-1] == end and end not in one[:-1] for one in replies), "and no line break"


@pytest.mark.parametrize(
    ("ids", "expected"),
    [([5, 2, 7], [5, 2]), ([5, 3, 6, 2, 7, 7], [5, 3, 6, 2]), ([5, 6], [5, 6]), ([], [])],
)
def test_a_reply_is_trained_up_to_its_last_end_of_turn(ids: list[int], expected: list[int]) -> None:
    assert up_to_end(ids, ends_of_turn(2, [3, 2])) == expected
    assert up_to_end(ids, ends_of_turn(None, None)) == ids
