"""Test the states by which steps are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bridle.reconstruct.samples.sample import Episode, Turn
from bridle.store.records import CallKind, CallStatus, Message
from bridle.store.reward import Reward, RewardSource
from bridle.trainer.batch.prepare import prepare
from bridle.trainer.config import AdvantageConfig, FilterConfig, GrpoConfig
from bridle.trainer.credit.anchors import ANCHORS, anchors
from bridle.trainer.credit.group import CreditGroup
from support.episodes import one_branch

Calls = Sequence[tuple[Sequence[int], str | None]]


def session(name: str, calls: Calls, rewards: Sequence[float] = ()) -> Episode:
    given = [
        Reward(name, "step", value, 1.0, call_id=f"{name}{place}", source=RewardSource.VERIFIER)
        for place, value in enumerate(rewards)
    ]
    return one_branch(name, calls, given, "completed")


def with_text(episode: Episode, *texts: Sequence[tuple[str, str]]) -> Episode:
    """Return the session with the messages that each of its calls added."""
    turns = tuple(
        Turn(
            f"{episode.session.id}{place}",
            CallKind.MAIN,
            CallStatus.COMPLETE,
            messages=tuple(Message(role, text) for role, text in added),  # type: ignore[arg-type]
        )
        for place, added in enumerate(texts)
    )
    return replace(episode, turns=turns)


def same(anchor: str, *episodes: Episode, **options: object) -> list[list[int]]:
    """Return the number of the state of each step, by session."""
    config = AdvantageConfig(anchor=anchor, options={"last_n": options} if options else {})
    group = CreditGroup(episodes, None, config)  # type: ignore[arg-type]
    keys = anchors(group)
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    found: list[list[int]] = [[] for _ in episodes]
    for step, key in zip(group.steps, keys, strict=True):
        found[step.episode].append(numbers[key])
    return found


GROWING: tuple[Calls, Calls] = (
    [([1], None), ([2], None), ([5], None)],
    [([3], None), ([2], None), ([5], None)],
)


@pytest.mark.parametrize(
    ("anchor", "options", "states"),
    [
        ("prompt", {}, [[0, 1, 2], [3, 4, 5]]),
        ("last_observation", {}, [[0, 1, 2], [3, 1, 2]]),
        ("state", {}, [[0, 1, 2], [3, 1, 2]]),
        ("last_n", {"n": 2}, [[0, 1, 2], [3, 4, 2]]),
        ("last_n", {"n": 3}, [[0, 1, 2], [3, 4, 5]]),
    ],
)
def test_what_is_one_state_where_prompts_keep_the_history(
    anchor: str, options: dict[str, object], states: list[list[int]]
) -> None:
    first, second = GROWING
    assert same(anchor, session("a", first), session("b", second), **options) == states


def test_where_prompts_are_states_the_default_is_the_prompt() -> None:
    """Each session here has one call, whose prompt holds no earlier one."""
    episodes = [session(n, [([1, last], None)]) for n, last in (("a", 2), ("b", 2), ("c", 3))]
    assert same("state", *episodes) == [[0], [0], [1]]


def test_the_same_observation_of_another_role_is_another_state() -> None:
    calls = [([1], "planner"), ([1], "worker"), ([1], "planner"), ([1], "worker")]
    assert same("state", session("a", calls)) == [[0, 1, 0, 1]]


def test_the_text_of_messages_is_the_observation_where_it_is_recorded() -> None:
    """The tokens may differ, as they do where a template drops earlier reasoning."""
    first = with_text(
        session("a", [([1], None), ([2], None)]),
        [("system", "Be brief."), ("user", "Go.")],
        [("assistant", "I look"), ("tool", "a lamp")],
    )
    second = with_text(
        session("b", [([8], None), ([9], None)]),
        [("system", "Be brief."), ("user", "Go.")],
        [("assistant", "I see"), ("tool", "a lamp")],
    )
    assert same("last_observation", first, second) == [[0, 1], [0, 1]]
    third = with_text(session("c", [([1], None)]), [("tool", "a door")])
    assert same("last_observation", first, third) == [[0, 1], [2]]


def test_a_function_of_a_file_is_an_anchor_and_none_is_a_state_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "def first(group, step):\n    return True if step.prompt[:1] == b'\\1' else None\n"
    )
    first, second = GROWING
    states = same(f"{file}:first", session("a", first), session("b", second))
    assert states == [[0, 0, 0], [1, 2, 3]]
    assert {"prompt", "last_observation", "last_n", "state"} == set(ANCHORS.names())


def test_gigpo_gives_credit_to_steps_whose_histories_differ() -> None:
    """Both sessions have the return 1; the second step is right in one of them."""
    first, second = GROWING
    episodes = [session("a", first, (0.0, 1.0, 0.0)), session("b", second, (1.0, 0.0, 0.0))]

    def credit(anchor: str) -> list[list[float]]:
        stated = AdvantageConfig(baseline="gigpo", anchor=anchor)
        filters = FilterConfig(drop_zero_variance=False)
        step = prepare(episodes, 0, GrpoConfig(advantages=stated, filters=filters))
        return [
            item.credit[item.sample.calls >= 0].astype(float).round(3).tolist()
            for item in step.items
        ]

    assert credit("prompt") == [[0.0] * 3] * 2
    assert credit("state") == [[0.0, 0.707, 0.0], [0.0, -0.707, 0.0]]
