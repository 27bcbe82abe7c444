"""``bridle bench`` prints the keys that the documentation quotes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from bridle.bench import continuation, path, store, vllm
from bridle.extras import install_command
from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.recipes.models.tiny_tokenizer import train_tokenizer


@pytest.mark.parametrize("name", ["continuation", "harnesses", "path", "vllm"])
def test_a_bench_that_needs_torch_says_how_to_get_it(
    bridle: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    done = bridle("bench", name)
    assert done.exit_code == 1
    assert done.stderr.startswith("bridle: this bench ")
    assert done.stderr.endswith(f": {install_command('train')} (there is no module torch)\n")


@pytest.mark.loop
def test_the_continuation_bench_measures_both_ways(
    bridle: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = continuation.measure((2048,), first_token_context=2048, rounds=1)
    monkeypatch.setattr(continuation, "measure", lambda **_: small)
    found = json.loads(bridle("bench", "continuation", "--json").output)
    times = found["contexts"]["2048"]
    assert 0 < times["exact_ms"] < times["rendered_ms"]
    assert times["ratio"] > 1
    assert times["prompt_tokens"] > 2048 > times["tail_tokens"] > 0
    assert found["ttft_ratio"]["2048"] > 0
    assert times["exact_alone_ms"] > times["json_ms"] > 0
    assert found["ttft_ratio_scripted"]["2048"] > 0
    assert "through the proxy" in bridle("bench", "continuation").output


def test_the_path_bench_counts_the_proxys_own_functions(
    bridle: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = path.measure(), path.measure()
    assert first["modules"] == second["modules"]
    assert first["python_calls"] == pytest.approx(second["python_calls"], rel=0.02)
    assert first["python_calls"] == sum(first["by_module"].values()) > first["hops"]
    assert first["modules"] == len(first["by_module"])
    assert "proxy/app.py" in first["by_module"]
    assert not any(module.startswith("engine/scripted") for module in first["by_module"])
    monkeypatch.setattr(path, "measure", lambda: first)
    assert json.loads(bridle("bench", "path", "--json").output) == first
    assert "python_calls" in bridle("bench", "path").output


@pytest.mark.loop
@pytest.mark.sampled(0)
def test_the_vllm_bench_compares_in_turns_and_accounts_for_every_token(
    bridle: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    size = train_tokenizer(tmp_path / "policy", ["The quick brown fox. 0123456789"] * 4)
    shape = TinyShape(hidden=32, layers=1, heads=1, kv_heads=1, intermediate=64)
    make_policy(tmp_path / "policy", shape, vocab_size=size, seed=0)
    plan = vllm.Plan(concurrency=2, rounds=2, calls=2, tokens=8)
    small = vllm.measure(plan, tmp_path / "policy", engine_kind="embedded")
    monkeypatch.setattr(vllm, "measure", lambda *_, **__: small)
    found = json.loads(bridle("bench", "vllm", "--json").output)
    assert (found["failed"], found["tokens_lost"]) == (0, 0)
    assert set(found["tokens_per_s"]) == {"direct", "direct_with_ids", "proxied"}
    assert all(len(values) == 2 for values in found["tokens_per_s_by_round"].values())
    assert found["ratio"] > 0
    assert found["proxy_cpu_us_per_token"] > 0
    assert "proxied/direct" in bridle("bench", "vllm").output


def test_the_store_bench_measures_sizes_beside_the_peers_way(
    bridle: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_LEAST_TURNS", 4)
    monkeypatch.setattr(store, "_COMMIT_TURNS", 2)
    found = json.loads(bridle("bench", "store", "--turns", "4", "--json").output)
    assert found["bytes_per_token"]["4"] > 0
    assert found["json_traces_ratio"]["4"] > found["json_per_call_ratio"]["4"] > 1
    assert found["commits_per_s"]["sqlite"] > 0
    assert found["synchronous"] == "FULL"


def test_calls_that_are_written_when_they_begin_take_no_more_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store, "_LEAST_TURNS", 60)
    once, apart = store.measure_size(20), store.measure_size(20, apart=True)
    assert once.tokens == apart.tokens
    assert abs(apart.size - once.size) <= 0.03 * once.size


def test_the_reconstruct_bench_reads_every_token_it_stored(bridle: Callable[..., Result]) -> None:
    found = json.loads(bridle("bench", "reconstruct", "--sessions", "3", "--json").output)
    assert (found["sessions"], found["samples"], found["tokens"]) == (3, 3, 3 * 10 * 600)
    assert found["tokens_per_s"] > 0
    assert found["peak_rss_mb"] >= found["rss_before_mb"] > 0
