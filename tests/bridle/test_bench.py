"""``bridle bench`` prints the keys that the documentation quotes."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from click.testing import Result

from bridle.bench import continuation


def test_the_continuation_bench_measures_both_ways(
    bridle: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = continuation.measure((2048,), first_token_context=2048, rounds=1)
    monkeypatch.setattr(continuation, "measure", lambda: small)
    found = json.loads(bridle("bench", "continuation", "--json").output)
    times = found["contexts"]["2048"]
    assert 0 < times["exact_ms"] < times["rendered_ms"]
    assert times["ratio"] > 1
    assert times["prompt_tokens"] > 2048 > times["tail_tokens"] > 0
    assert found["ttft_ratio"]["2048"] > 0
    assert found["ttft_ratio_scripted"]["2048"] > 0
    assert "through the proxy" in bridle("bench", "continuation").output
