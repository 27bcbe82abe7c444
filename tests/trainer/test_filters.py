"""Each filter against what its paper says, and the account of what it leaves out."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bridle.reconstruct.samples.sample import Turn
from bridle.store.records import CallKind, CallStatus
from bridle.store.reward import Reward, RewardSource
from bridle.trainer.batch.filters import FilterFailed
from bridle.trainer.batch.prepare import prepare
from bridle.trainer.config import AdvantageConfig, FilterConfig, GrpoConfig
from bridle.trainer.filters.overlong import overlong_punishment
from bridle.trainer.filters.resample_on_correct import call_penalty, kept_on_correct
from support.episodes import one_branch


def turn(**fields) -> Turn:
    given = {"finish_reason": "stop", "has_text": True, "status": CallStatus.COMPLETE}
    return Turn("c", CallKind.MAIN, **given | fields)


ACTS = turn(finish_reason="tool_calls", tool_calls=1, has_text=False)
ANSWERS = turn()
VOID = turn(has_text=False)
UNREADABLE = turn(parse_failed=True)
CUT = turn(finish_reason="length")
REFUSED = turn(status=CallStatus.FAILED, reason="budget", finish_reason=None, has_text=False)
OVERFLOWN = dataclasses.replace(REFUSED, reason="context_overflow")
ENGINE_FAULT = dataclasses.replace(REFUSED, reason="upstream")


@pytest.fixture
def session(make_sample, make_episode):
    def make(name, reward, *turns, **fields):
        episode = make_episode([make_sample([1, 2, 3], [1, 2], session=name)], reward, session=name)
        record = dataclasses.replace(episode.session, **fields)
        return dataclasses.replace(episode, turns=turns, session=record)

    return make


@pytest.mark.parametrize(
    ("name", "turns", "outcome", "kept"),
    [
        ("void_turn", (ACTS, ANSWERS), "completed", True),
        ("void_turn", (ACTS, VOID, ANSWERS), "completed", False),
        ("void_turn", (UNREADABLE, ANSWERS), "completed", False),
        ("void_turn", (ACTS, ENGINE_FAULT, ANSWERS), "completed", True),
        ("over_turn", (ACTS, ANSWERS), "completed", True),
        ("over_turn", (ACTS, REFUSED), "agent_error", False),
        ("over_turn", (ACTS, OVERFLOWN), "agent_error", False),
        ("over_turn", (ACTS,), "timeout", False),
        ("truncated", (CUT, ANSWERS), "completed", True),
        ("truncated", (ACTS, CUT), "completed", False),
        ("truncated", (ACTS, CUT, REFUSED), "completed", False),
        ("failed_calls", (ACTS, REFUSED), "agent_error", True),
        ("failed_calls", (ACTS, ENGINE_FAULT, ANSWERS), "completed", False),
    ],
)
def test_a_filter_leaves_out_its_sessions_after_the_baseline_and_counts_them(
    session, name, turns, outcome, kept
):
    outcomes = {"timeout": "train"}
    filters = FilterConfig(extra=(name,), outcomes=outcomes)
    config = GrpoConfig(filters=filters, advantages=AdvantageConfig("mean"))
    judged = session("judged", 0.0, *turns, outcome=outcome)
    prepared = prepare([judged, session("other", 1.0, ANSWERS)], 0, config)
    assert prepared.sessions_dropped == ({} if kept else {name: 1})
    assert prepared.account.dropped == ({} if kept else {name: 2})
    assert prepared.account.balanced
    found = {item.sample.session_id: float(item.credit[1]) for item in prepared.items}
    assert found["other"] == 0.5, "the baseline is over both"
    without = prepare(
        [judged, session("other", 1.0, ANSWERS)],
        0,
        GrpoConfig(filters=FilterConfig(outcomes=outcomes)),
    )
    assert without.sessions_dropped == {}, "off by default"


def test_length_is_punished_as_in_dapos_equation_13(session):
    limit, margin = 100, 20
    for sampled in range(140):
        if sampled <= limit - margin:
            expected = 0.0
        elif sampled <= limit:
            expected = ((limit - margin) - sampled) / margin
        else:
            expected = -1.0
        assert overlong_punishment(sampled, limit, margin) == pytest.approx(expected, abs=1e-12)
    shaped = AdvantageConfig("mean", overlong_tokens=2, overlong_margin=2)
    episodes = [session("a", 1.0), session("b", 1.0)]
    longer = dataclasses.replace(episodes[1].conservation, captured=9, dropped={"kind_side": 7})
    episodes[1] = dataclasses.replace(episodes[1], conservation=longer)
    prepared = prepare(episodes, 0, GrpoConfig(advantages=shaped))
    assert prepared.rewards == (0.0, 0.0)
    shaped = dataclasses.replace(shaped, overlong_tokens=4)
    prepared = prepare(episodes, 0, GrpoConfig(advantages=shaped))
    assert prepared.rewards == (1.0, 0.0)
    assert prepared.punished_sessions == 1


def test_on_correct_half_of_each_kind_is_kept_and_clean_successes_first(session):
    clean = [session(f"clean-{n}", 1.0, ACTS, ANSWERS) for n in range(4)]
    faulty = [session(f"faulty-{n}", 1.0, UNREADABLE, ACTS, ANSWERS) for n in range(4)]
    failed = [session(f"failed-{n}", 0.0, ACTS) for n in range(8)]
    group = [*clean, *faulty, *failed]
    rewards = np.asarray([1.0] * 8 + [0.0] * 8)
    assert [call_penalty(one) for one in (clean[0], faulty[0])] == [0.0, 0.5]
    assert call_penalty(session("talks", 1.0, ANSWERS)) == 0.5
    counts = np.zeros(16)
    for seed in range(400):
        kept = kept_on_correct(group, rewards, seed)
        assert (kept[:8].sum(), kept[8:].sum()) == (4, 4)
        counts += kept
    # Weights are 1 / 0.01 and 1 / 0.51: the four clean ones are nearly always the four kept.
    assert (counts[:4] > 0.9 * 400).all()
    assert (counts[4:8] < 0.1 * 400).all()
    assert np.abs(counts[8:] / 400 - 0.5).max() < 0.12, "failures are kept at random"
    assert (kept_on_correct(group, rewards, 3) == kept_on_correct(group, rewards, 3)).all()


def test_resampling_is_before_the_baseline_and_accounts_for_what_it_drops(session):
    group = [session(f"{n}", float(n < 2), ACTS) for n in range(8)]
    config = GrpoConfig(
        filters=FilterConfig(resample_on_correct=True), advantages=AdvantageConfig("mean")
    )
    prepared = prepare(group, 0, config)
    assert prepared.sessions_dropped == {"resampled": 4}
    assert sorted(prepared.rewards) == [0.0, 0.0, 0.0, 1.0]
    assert prepared.account.balanced
    assert {round(float(item.credit[1]), 6) for item in prepared.items} == {0.75, -0.25}


def test_a_filter_may_leave_out_turns_or_tokens_under_its_name(
    make_sample, make_episode, tmp_path
) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "import numpy as np\n"
        "def turns(episode): return {'s0'}\n"
        "def tokens(episode): return [np.arange(len(s.mask)) > 2 for s in episode.samples]\n"
        "def nothing(episode): return []\n"
        "def short(episode): return [np.ones(1, bool)]\n"
        "def number(episode): return 0.5\n"
    )
    pair = [one_branch(name, [([1], None), ([1], None)], (), "completed") for name in "st"]
    verifier = RewardSource.VERIFIER
    pair = [
        dataclasses.replace(
            one, rewards=(Reward(one.session.id, "reward", value, 0.0, source=verifier),)
        )
        for one, value in zip(pair, (0.0, 1.0), strict=True)
    ]

    def prepared(*names: str):
        extra = tuple(f"{file}:{name}" for name in names)
        return prepare(pair, 0, GrpoConfig(filters=FilterConfig(extra=extra)))

    assert dict(prepared("turns").account.masked) == {"turns": 1}
    assert dict(prepared("tokens").account.masked) == {"tokens": 2}
    both = prepared("turns", "tokens", "nothing")
    assert dict(both.account.masked) == {"turns": 1, "tokens": 2}
    assert (both.account.trained, both.account.balanced) == (1, True)
    assert len(both.items) == 1
    assert both.rewards == (0.0, 1.0), "no baseline has shifted"
    with pytest.raises(FilterFailed, match="the filter short returned no decision about session s"):
        prepared("short")
    with pytest.raises(FilterFailed, match="the filter number returned no decision"):
        prepared("number")
