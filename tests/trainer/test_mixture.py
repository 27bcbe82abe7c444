"""Recorded sessions beside a step's own: which are drawn, with which weight, and their account."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridle.store.records import SessionRecord
from bridle.trainer.batch.prepare import prepare
from bridle.trainer.collection.mixture import Mixture, learn_baselines
from bridle.trainer.config import FilterConfig, GrpoConfig, LossConfig, OptimizerConfig
from bridle.trainer.learner.batches import loss_terms, pack_minibatch
from bridle.trainer.losses.importance import importance_weights
from bridle.trainer.policy.model import TokenScores

CONFIG = GrpoConfig(
    steps=2,
    optimizer=OptimizerConfig(learning_rate=1e-2),
    filters=FilterConfig(drop_zero_variance=False),
)


@pytest.fixture
def stored(make_sample, make_episode):
    """Makes a session of a task with two trained tokens."""

    def make(name, task, reward, at=0.0, logprob=-1.0, **fields):
        sample = make_sample([1, 2, 3, 4], (2, 3), session=name, logprobs=logprob, version=3)
        episode = make_episode([sample], reward, session=name, **fields)
        named = {} if task is None else dict.fromkeys(("task_suite", "task_split"), "s")
        record = dataclasses.replace(
            episode.session, task_id=task, group_id=None, created_at=at, run_id="other", **named
        )
        return dataclasses.replace(episode, session=record)

    return make


def mixture_of(recorded, share=0.5, per_task=64):
    by_id = {one.session.id: one for one in recorded}
    return Mixture(lambda: [one.session for one in recorded], by_id.__getitem__, share, per_task)


def draw(mixture, own, *, step=0, taken=frozenset(), config=CONFIG):
    memory = {}
    learn_baselines(own, prepare(own, 3, config), memory)
    return mixture.draw(own, taken, config, memory, step=step, policy="policy")


rewards = st.sampled_from([0.0, 0.5, 1.0, None])
sessions = st.lists(st.tuples(st.sampled_from("abc"), rewards), max_size=14)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(sessions, st.integers(1, 8), st.floats(0, 1), st.integers(1, 3), st.integers(0, 5))
def test_the_share_is_kept_and_no_session_is_trained_twice(
    stored, recorded, size, share, per_task, step
):
    own = [stored(f"own{n}", "a", float(n % 2)) for n in range(size)]
    others = [stored(f"r{n}", task, value, at=n) for n, (task, value) in enumerate(recorded)]
    mixture = mixture_of([*own, *others], share, per_task)
    found = draw(mixture, own, step=step, taken={"r0"})
    latest = {
        one.session.id
        for task in "abc"
        for one in [o for o in others[1:] if o.session.task_id == task][-per_task:]
    }
    assert found.candidates == len(latest)
    names = [one.session.id for one in found.episodes]
    assert len(set(names)) == len(names) <= round(share * size)
    assert set(names) <= latest
    items = Counter(item.sample.session_id for item in found.items)
    assert items == Counter(names)
    assert not {item.session for item in found.items} & set(range(2 * size))
    baseline = float(np.mean([n % 2 for n in range(size)]))
    for item in found.items:
        reward = mixture.load(item.sample.session_id).rewards[0].value
        assert set(item.credit.tolist()) == {np.float32(reward - baseline)}
        assert reward != baseline, "nothing to learn"
    usable = [one for one in others[1:] if one.rewards and one.rewards[0].value != baseline]
    if len(usable) == len(others[1:]):
        assert len(names) == min(round(share * size), len(latest))
    again = draw(mixture, own, step=step, taken={"r0"})
    assert [one.session.id for one in again.episodes] == names
    assert all(account.balanced and account.trained for account in found.accounts)


def test_tasks_are_drawn_in_turn(stored):
    others = [stored(f"many{n}", "many", 1.0) for n in range(20)]
    others += [stored("one", "one", 1.0), stored("two", "two", 1.0)]
    own = [stored(f"own{n}", "own", 0.0) for n in range(6)]
    names = {one.session.id for one in draw(mixture_of(others), own).episodes}
    assert {"one", "two"} < names
    assert len(names) == 3


def test_a_task_is_compared_with_its_own_latest_group_else_with_the_latest_of_all(stored):
    memory: dict[str, float] = {}
    for values, task in (((1.0, 0.0), "a"), ((0.25, 0.25), "b")):
        own = [stored(f"{task}{n}", task, value) for n, value in enumerate(values)]
        learn_baselines(own, prepare(own, 3, CONFIG), memory)
    others = [stored("x", "a", 1.0), stored("y", "b", 0.0), stored("z", "c", 1.0)]
    mixture = mixture_of(others, share=1.0)
    own = [stored(f"own{n}", "d", 0.0) for n in range(4)]
    found = mixture.draw(own, frozenset(), CONFIG, memory, step=0, policy="policy")
    credit = {item.sample.session_id: float(item.credit[0]) for item in found.items}
    assert credit == {"x": 0.5, "y": -0.25, "z": 0.75}
    assert not mixture.draw(own, frozenset(), CONFIG, {}, step=0, policy="policy").items


def test_what_the_run_would_not_train_of_its_own_is_not_drawn_from_elsewhere(stored):
    strange = stored("strange", "c", 1.0)
    strange = dataclasses.replace(
        strange, session=dataclasses.replace(strange.session, vocabulary="other")
    )
    others = [
        stored("late", "a", 1.0, outcome="timeout"),
        stored("broken", "b", 1.0, outcome="infrastructure"),
        strange,
        stored("good", "d", 1.0),
    ]
    own = [stored(f"own{n}", "own", 0.0) for n in range(4)]
    known = dataclasses.replace(own[0].session, vocabulary="ours")
    own[0] = dataclasses.replace(own[0], session=known)
    found = draw(mixture_of(others, share=1.0), own)
    assert [one.session.id for one in found.episodes] == ["good"]


@given(st.floats(-6, -0.01), st.floats(-6, -0.01), st.floats(0.5, 4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_recorded_token_is_weighed_by_its_truncated_ratio_to_the_recorded_logprob(
    stored, now, then, cap
):
    own = [stored(f"own{n}", "own", 0.0) for n in range(2)]
    found = draw(mixture_of([stored("r", "a", 1.0, logprob=then)]), own)
    (pack,) = pack_minibatch(found.items, CONFIG)
    logprobs = torch.full((2,), now)
    terms = loss_terms(pack, TokenScores(logprobs, torch.zeros(2)))
    weights = importance_weights(terms, LossConfig(importance_cap=cap))
    expected = min(float(np.exp(np.float32(now) - np.float32(then))), cap)
    assert weights.tolist() == pytest.approx([expected] * 2, rel=1e-4)


def test_a_loop_trains_recordings_beside_its_own_and_accounts_for_both(bandit_loop, stored):
    fates = []
    loop, bandit = bandit_loop(CONFIG, account=fates.extend)
    loop.mixture = mixture_of([stored(f"r{n}", f"t{n}", 1.0) for n in range(30)], share=0.25)
    reports = []
    loop.run(reports.append)
    for report in reports:
        metrics = report.metrics()
        assert metrics["recordings/sessions"] == round(0.25 * metrics["sessions/collected"]) == 12
        assert metrics["recordings/tokens"] == 24
        assert metrics["recordings/candidates"] == 30
        assert report.update.loss["tokens"] == metrics["tokens/trained"] + 24
        assert report.update.gap.tokens == metrics["tokens/trained"], "not those of another run"
        assert not [
            name for name in metrics if name.startswith("kl/sampler/lag_") and "_0" not in name
        ]
    origins = Counter(
        (one.step, one.session_id[0] == "r", *next(iter(one.tokens))) for one in fates
    )
    for step in range(2):
        assert origins[step, True, "trained", "recording"] == 12
        assert origins[step, False, "trained", ""] == 2 * bandit.sessions
    assert len(fates) == 2 * (2 * bandit.sessions + 12)


def test_a_session_record_without_a_task_is_a_task_of_its_own(stored):
    lone = [stored(f"r{n}", None, 1.0) for n in range(3)]
    assert all(isinstance(one.session, SessionRecord) for one in lone)
    own = [stored(f"own{n}", "own", 0.0) for n in range(6)]
    assert len(draw(mixture_of(lone, per_task=1), own).episodes) == 3
