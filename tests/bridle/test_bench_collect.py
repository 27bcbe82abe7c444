"""``bridle bench collect``: sessions keep their slots busy while the policy trains."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from click.testing import Result

pytestmark = pytest.mark.loop


@pytest.mark.sampled(0)
def test_slots_stay_busy_within_the_bound_of_staleness(bridle: Callable[..., Result]) -> None:
    small = ("--steps", "12", "--median", "0.1", "--train", "0.02")
    done = bridle(
        "bench", "collect", *small, "--max-staleness", "0", "--max-staleness", "4", "--json"
    )
    assert done.exit_code == 0, done.output
    in_turn, ahead = json.loads(done.stdout)
    assert (in_turn["staleness"], in_turn["trained"]) == (0, 1.0)
    assert in_turn["slot_use"] < 0.4
    assert ahead["slot_use"] >= 0.85
    assert 0 < ahead["staleness"] <= 4
    assert ahead["seconds_per_step"] < in_turn["seconds_per_step"] / 2
    words = bridle("bench", "collect", *small, "--max-staleness", "4")
    assert words.stdout.startswith("staleness 4 (mean ")


def test_by_sessions_long_ones_are_trained_too(bridle: Callable[..., Result]) -> None:
    small = ("--steps", "12", "--median", "0.3", "--train", "0.05", "--max-staleness", "1")
    groups, sessions = (
        json.loads(bridle("bench", "collect", *small, "--collection", unit, "--json").stdout)[0]
        for unit in ("groups", "sessions")
    )
    assert sessions["useful"] > groups["useful"] + 0.2
    assert sessions["mean_lag"] < 2.5
    assert min(sessions["deciles"]) >= 0.9


def test_streamed_sessions_are_recorded_across_real_publishes(
    bridle: Callable[..., Result],
) -> None:
    small = ("--slots", "8", "--groups", "2", "--group-size", "4", "--steps", "4")
    done = bridle(
        *("bench", "collect", "--streamed", "--collection", "sessions", "--max-staleness", "1"),
        *(*small, "--median", "0.5", "--train", "0.2", "--json"),
    )
    (found,) = json.loads(done.stdout)
    assert found["staleness"] > 0, "tokens carry the versions that were published meanwhile"
    assert found["useful"] > 0.6
    assert found["trained"] > 0.8
