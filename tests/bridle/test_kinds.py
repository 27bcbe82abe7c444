"""``bridle kind`` and ``bridle samples``, and the control API's way to say a kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from reconstruct import open_store
from reconstruct.derived import kept_samples
from store.queries import Reader
from store.records import CallKind


def test_a_kind_is_said_and_taken_back_and_kept_samples_follow(
    bridle: Callable[..., Result], recorded: str, store: str
) -> None:
    trained = json.loads(bridle("samples", recorded, "--json", "--store", store).output)[
        "trained_tokens"
    ]
    said = bridle("kind", recorded, "1", "side", "--role", "title", "--json", "--store", store)
    told = json.loads(said.output)
    first = next(iter(told["kinds"]))
    assert told["kinds"][first] == "side"
    with open_store(store) as opened:
        session = opened.session(recorded)
        assert session.calls[0].kind is CallKind.SIDE
        assert session.calls[0].role == "title"
        policy, kept = kept_samples(opened.reader, session.id)
        assert policy is not None
        assert sum(int(sample.mask.sum()) for sample in kept) < trained
    bridle("kind", recorded, "1", "auto", "--store", store)
    with Reader(store) as reader:
        named = reader.session_by_name(recorded)
        assert named is not None
        _, kept = kept_samples(reader, named.id)
        assert sum(int(sample.mask.sum()) for sample in kept) == trained


def test_a_whole_line_can_be_said_at_once(
    bridle: Callable[..., Result], recorded: str, store: str
) -> None:
    told = json.loads(
        bridle("kind", recorded, "1", "subagent", "--line", "--json", "--store", store).output
    )
    assert set(told["kinds"].values()) == {"subagent"}


@pytest.mark.parametrize(
    "wrong", [("99", "side"), ("1", "holiday")], ids=["no such turn", "no such kind"]
)
def test_a_wrong_turn_or_kind_is_refused(
    bridle: Callable[..., Result], recorded: str, store: str, wrong: tuple[str, str]
) -> None:
    assert bridle("kind", recorded, *wrong, "--store", store).exit_code != 0


def test_samples_are_kept_under_a_policy_from_text_or_file(
    bridle: Callable[..., Result], recorded: str, store: str, tmp_path: Path
) -> None:
    none = '{"kinds": ["compaction"]}'
    file = tmp_path / "policy.json"
    file.write_text(none)
    for given in (none, str(file)):
        told = json.loads(
            bridle("samples", recorded, "--policy", given, "--json", "--store", store).output
        )
        assert (told["trained_tokens"], told["policy"]["kinds"]) == (0, ["compaction"])
    for wrong in ('{"colour": 1}', str(tmp_path / "none.json"), "{"):
        assert bridle("samples", "--policy", wrong, "--store", store).exit_code == 2
