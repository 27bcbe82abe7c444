"""Test a user's own scorer, anchor, filter and estimator, each one file, in a run of training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bridle.reconstruct.episodes import episodes
from bridle.store.reading.queries import Reader
from support.processes import bridle
from support.rollouts import ASK

AGENT = """
messages = [{"role": "user", "content": sys.argv[1]}]
for seen in ("one", "two"):
    reply = ask(messages, max_tokens=4)
    messages.append({"role": "assistant", "content": reply["content"] or ""})
    messages.append({"role": "user", "content": seen})
print("done")
"""
FILES = {
    "scorer": """
def letters(session):
    from bridle import Score
    values = {turn.turn: sum(map(ord, turn.text)) / 1000 for turn in session.turns}
    return [Score("turn", value, turn=turn) for turn, value in values.items()]
""",
    "anchor": """
def asked(group, step):
    return step.turn.observation
""",
    "filter": """
def late(episode):
    return [turn.call_id for turn in episode.turns[1:]]
""",
    "estimator": """
def by_question(group):
    assert len(group.batch) == 12, len(group.batch)
    assert all(one.payload == {"answer": one.session.task_id} for one in group.episodes)
    assert all(step.turn.messages[0].content for step in group.steps)
    from bridle.trainer.credit.steps import gigpo
    return gigpo(group)
""",
}


def trained(arguments: list[str], settings: list[str]) -> None:
    """Train one step with ``settings``."""
    sets = [part for one in settings for part in ("--set", one)]
    done = bridle(*arguments, "--steps", "1", *sets)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.loop
@pytest.mark.usefixtures("warm_start")
def test_each_is_one_file_that_a_setting_names(
    training_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    arguments = training_arguments()
    (tmp_path / "agent.py").write_text(ASK + AGENT)
    (tmp_path / "verifier.py").write_text("def check(delivery): return 0.0\n")
    tasks = "".join(
        f'{{"id": "t{n}", "prompt": "Question {n}?", "payload": {{"answer": "t{n}"}}}}\n'
        for n in range(4)
    )
    (tmp_path / "tasks.jsonl").write_text(tasks)
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    own = [
        f'scorers.named=["{tmp_path}/scorer.py:letters"]',
        'training.advantages.reward_weights={reward = 1.0, "letters.turn" = 1.0}',
        'training.advantages.reward_turns="sum"',
        f"training.advantages.baseline={tmp_path}/estimator.py:by_question",
        f"training.advantages.anchor={tmp_path}/anchor.py:asked",
        f'training.filters.extra=["{tmp_path}/filter.py:late"]',
    ]
    trained(arguments, own)
    with Reader(str(tmp_path / "out" / "bridle.db")) as reader:
        (run,) = reader.runs("train")
        built = list(episodes(reader, run=run.id))
        figures = {one.name: one.value for one in reader.metrics(run.id)}
    turns = [[one.call_id for one in episode.turns] for episode in built]
    assert [len(one) for one in turns] == [2] * 12
    for episode, own_turns in zip(built, turns, strict=True):
        steps = [one.call_id for one in episode.rewards if one.name == "letters.turn"]
        assert steps == own_turns
    tokens = [
        int((sample.mask & (sample.calls == place)).sum())
        for episode in built
        for sample in episode.samples
        for place, call_id in enumerate(sample.call_ids)
        if call_id == episode.turns[1].call_id
    ]
    assert figures["tokens/masked/late"] == sum(tokens) > 0
    assert 0 < figures["tokens/trained"] <= sum(e.conservation.trained for e in built) - sum(tokens)
    assert figures["reward/mean"] > 0, "the verifier gives 0"


ROLES_AGENT = """
for role in ("planner", "worker"):
    asked = [{"role": "user", "content": f"{sys.argv[1]} {role}"}]
    reply = ask(asked, {"thread-id": role}, max_tokens=4)
print("done")
"""
ROLES_VERIFIER = """
import itertools
from bridle import Score

numbers = itertools.count()

async def check(delivery):
    plans = float(next(numbers) % 2)
    return [
        Score("reward", plans, role="planner"),
        Score("reward", 1.0 - plans, role="worker"),
    ]
"""
WATCHED = """
import json, os
from bridle.trainer.credit import ADVANTAGES
from bridle.trainer.credit.group import stepwise

@stepwise
def watched(group):
    credit = ADVANTAGES.get("per_role")(group)
    with open(os.environ["WATCHED"], "a") as file:
        for episode, samples in zip(group.episodes, credit):
            for sample, own in zip(episode.samples, samples):
                here = sorted(set(own[sample.mask].tolist()))
                file.write(json.dumps([episode.session.id, sample.role, here]) + "\\n")
    return credit
"""


@pytest.mark.loop
@pytest.mark.usefixtures("warm_start")
def test_a_verifier_s_rewards_of_roles_reach_the_roles_advantages(
    training_arguments: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session's number is 0.5 in all sessions: only the roles differ."""
    arguments = training_arguments()
    (tmp_path / "agent.py").write_text(ASK + ROLES_AGENT)
    (tmp_path / "verifier.py").write_text(ROLES_VERIFIER)
    (tmp_path / "watched.py").write_text(WATCHED)
    monkeypatch.setenv("WATCHED", str(tmp_path / "watched.jsonl"))
    trained(arguments, [f"training.advantages.baseline={tmp_path}/watched.py:watched"])
    with Reader(str(tmp_path / "out" / "bridle.db")) as reader:
        (run,) = reader.runs("train")
        built = {one.session.id: one for one in episodes(reader, run=run.id)}
        figures = {one.name: one.value for one in reader.metrics(run.id)}
    given = {
        (name, reward.role): reward.value for name, one in built.items() for reward in one.rewards
    }
    assert len(given) == 24
    assert all(given[name, "planner"] + given[name, "worker"] == 1.0 for name in built)
    calls = [json.loads(line) for line in (tmp_path / "watched.jsonl").read_text().splitlines()]
    seen = [one for one in calls if not one[0].startswith("trial-")]
    assert {(name, role) for name, role, _ in seen} == given.keys()
    for name, role, (advantage,) in seen:
        assert np.sign(advantage) == 2 * given[name, role] - 1
    assert figures["tokens/trained"] == sum(one.conservation.trained for one in built.values())
    assert figures["update/grad_norm"] > 0
