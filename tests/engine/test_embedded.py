"""The embedded engine as it runs: a thread, a server, clients that come and go."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from bridle.engine.contract.client import EngineClient, EngineRefused
from bridle.engine.contract.tokenizer import Tokenizer
from bridle.engine.embedded import (
    EmbeddedEngine,
    EmbeddedSettings,
    SchedulerLimits,
    UnservableModel,
    WeightsMismatch,
)
from bridle.engine.embedded.model import PackedModel, load_state
from support.processes import until

Ids = Callable[[int, int], list[int]]
Reference = Callable[[list[int]], torch.Tensor]
CHAT = "/v1/chat/completions"


def body(ids: list[int], **extra: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "ids are given"}],
        "kv_transfer_params": {"prompt_token_ids": ids},
        "return_token_ids": True,
        "logprobs": True,
        "ignore_eos": True,
        "max_tokens": 30,
        **extra,
    }


def test_concurrent_replies_have_the_logprobs_of_a_plain_forward_pass(
    engine: EmbeddedEngine, reference: Reference, random_ids: Ids
) -> None:
    def ask(seed: int) -> float:
        ids = random_ids(seed, 20 + 30 * seed)
        reply = httpx.post(engine.base_url + CHAT, json=body(ids, seed=seed), timeout=60).json()
        choice = reply["choices"][0]
        sampled = choice["token_ids"]
        expected = reference([*ids, *sampled])[len(ids) - 1 : -1]
        wanted = expected.gather(-1, torch.tensor(sampled)[:, None])[:, 0]
        found = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
        return float((wanted - found).abs().max())

    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(ask, range(8))) < 1e-4


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(
    engine: EmbeddedEngine, random_ids: Ids, stream: bool
) -> None:
    scheduler = engine.backend.scheduler
    request = body(random_ids(1, 40), stream=stream, max_tokens=1900)
    with httpx.Client(base_url=engine.base_url, timeout=0.5) as client:
        if stream:
            with client.stream("POST", CHAT, json=request) as reply:
                assert any(line.startswith("data: {") for line in reply.iter_lines())
        else:
            with pytest.raises(httpx.TimeoutException):
                client.post(CHAT, json=request)
            assert scheduler.steps > 1
    until(lambda: not scheduler.running)
    steps = scheduler.steps
    time.sleep(0.1)
    assert scheduler.steps == steps


def test_one_of_several_choices_cannot_outlive_its_client(
    engine: EmbeddedEngine, random_ids: Ids
) -> None:
    request = body(random_ids(1, 40), stream=True, max_tokens=1900, n=4)
    with httpx.stream("POST", engine.base_url + CHAT, json=request, timeout=10) as reply:
        lines = reply.iter_lines()  # httpx hangs up when the iterator is dropped
        assert any(line.startswith("data: {") for line in lines)
        until(lambda: len(engine.backend.scheduler.running) == 4)
    until(lambda: not engine.backend.scheduler.running)


def test_a_stop_string_frees_the_slot(engine: EmbeddedEngine, random_ids: Ids) -> None:
    request = body(random_ids(1, 40), max_tokens=1900, stop=["e", "a", "s", "t", "o", "\ufffd"])
    choice = httpx.post(engine.base_url + CHAT, json=request, timeout=60).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    until(lambda: not engine.backend.scheduler.busy)


def test_weights_from_memory_are_served_from_the_next_token_on(
    engine: EmbeddedEngine, other_dir: Path, reference_of: Any, random_ids: Ids
) -> None:
    ids = random_ids(1, 50)
    with EngineClient(engine.base_url) as control:
        before = control.score(ids)
        assert engine.policy_version == 0
        version = engine.load_weights(load_state(other_dir, torch.float32))
        assert version == engine.policy_version == 1
        after = control.score(ids)
        assert np.abs(after - before).max() > 0.01
        expected = reference_of(other_dir)(ids)[:-1].gather(-1, torch.tensor(ids[1:])[:, None])
        np.testing.assert_allclose(after, expected[:, 0].numpy(), atol=1e-4)
        assert httpx.get(engine.base_url + "/version").json()["policy_version"] == 1
        with pytest.raises(WeightsMismatch):
            engine.load_weights({"nonsense": torch.zeros(1)})
        assert engine.policy_version == 1


def test_a_reload_from_a_directory_is_verified_by_scoring(
    engine: EmbeddedEngine, other_dir: Path, reference_of: Any, random_ids: Ids
) -> None:
    ids = random_ids(2, 50)
    with EngineClient(engine.base_url) as control:
        control.score(ids)
        control.pause("wait")
        control.reload_weights(other_dir)
        control.resume()
        expected = reference_of(other_dir)(ids)[:-1].gather(-1, torch.tensor(ids[1:])[:, None])
        np.testing.assert_allclose(control.score(ids), expected[:, 0].numpy(), atol=1e-4)


def test_the_same_weights_have_the_same_mark_however_they_came(
    engine: EmbeddedEngine, tiny_dir: Path, other_dir: Path
) -> None:
    def mark() -> str:
        told = httpx.get(engine.base_url + "/version").json()["weights_fingerprint"]
        assert isinstance(told, str)
        return told

    first = mark()
    other = PackedModel(other_dir, device="cpu", dtype=torch.float32).digest()
    with EngineClient(engine.base_url) as control:
        engine.load_weights(load_state(other_dir, torch.float32))
        assert mark() == other != first
        control.reload_weights(tiny_dir)
        assert mark() == first
    nudged = dict(load_state(tiny_dir, torch.float32))
    nudged["model.norm.weight"] = nudged["model.norm.weight"] * (1 + 1e-6)
    engine.load_weights(nudged)
    assert mark() != first


def test_weights_of_another_shape_are_refused_and_the_old_ones_are_served(
    engine: EmbeddedEngine, tmp_path: Path, random_ids: Ids
) -> None:
    from bridle.recipes.models.tiny import TinyShape, make_policy

    make_policy(tmp_path, TinyShape(hidden=32), vocab_size=300)
    with EngineClient(engine.base_url) as control:
        before = control.score(random_ids(1, 20))
        with pytest.raises(EngineRefused, match="the served model's is"):
            control.reload_weights(tmp_path)
        np.testing.assert_allclose(control.score(random_ids(1, 20)), before, atol=1e-5)
    assert engine.policy_version == 0


def test_weights_that_are_not_there_whole_are_refused_and_the_old_ones_are_served(
    engine: EmbeddedEngine, other_dir: Path, tmp_path: Path, random_ids: Ids
) -> None:
    shutil.copytree(other_dir, tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with EngineClient(engine.base_url) as control:
        before = control.score(random_ids(1, 20))
        with pytest.raises(EngineRefused, match="no loadable causal LM") as refusal:
            control.reload_weights(tmp_path)
        assert refusal.value.status == 400
        np.testing.assert_allclose(control.score(random_ids(1, 20)), before, atol=1e-5)


def test_a_paused_engine_can_be_told_to_wait_after_it_was_frozen(
    engine: EmbeddedEngine, random_ids: Ids
) -> None:
    request = body(random_ids(1, 10), max_tokens=400)
    with ThreadPoolExecutor(1) as pool, EngineClient(engine.base_url) as control:
        reply = pool.submit(httpx.post, engine.base_url + CHAT, json=request, timeout=30)
        until(lambda: bool(engine.backend.scheduler.running))
        control.pause("keep")
        assert not reply.done()
        control.pause("wait")
        assert len(reply.result().json()["choices"][0]["token_ids"]) == 400
        control.resume()


def test_pausing_with_clear_cache_forgets_prefixes(engine: EmbeddedEngine, random_ids: Ids) -> None:
    cache = engine.backend.scheduler.cache
    with EngineClient(engine.base_url) as control:
        for clear, left in ((False, 1), (True, 0)):
            httpx.post(engine.base_url + CHAT, json=body(random_ids(1, 30)), timeout=30)
            control.pause("wait", clear_cache=clear)
            control.resume()
            assert len(cache) == left
        httpx.post(engine.base_url + CHAT, json=body(random_ids(1, 30)), timeout=30)
        assert httpx.post(engine.base_url + "/reset_prefix_cache").status_code == 200
        assert len(cache) == 0


def test_the_engines_death_is_told_to_its_clients(
    engine: EmbeddedEngine, random_ids: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any) -> None:
        raise MemoryError("no room for keys")

    monkeypatch.setattr(engine.backend.scheduler.model, "forward", die)
    monkeypatch.setattr("threading.excepthook", lambda *_: None)
    reply = httpx.post(engine.base_url + CHAT, json=body(random_ids(1, 30)), timeout=30)
    assert reply.status_code == 500
    assert "no room for keys" in reply.json()["error"]["message"]
    assert httpx.get(engine.base_url + "/health").status_code == 503
    late = httpx.post(engine.base_url + CHAT, json=body(random_ids(1, 30)), timeout=30)
    assert late.status_code == 500


def test_constrained_output_is_refused_instead_of_ignored(
    engine: EmbeddedEngine, random_ids: Ids
) -> None:
    request = body(random_ids(1, 30), response_format={"type": "json_object"})
    reply = httpx.post(engine.base_url + CHAT, json=request, timeout=30)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "response_format"
    plain = body(random_ids(1, 30), response_format={"type": "text"})
    assert httpx.post(engine.base_url + CHAT, json=plain, timeout=30).status_code == 200


def test_cached_tokens_are_reported_in_usage(engine: EmbeddedEngine, random_ids: Ids) -> None:
    ids = random_ids(3, 120)
    first = httpx.post(engine.base_url + CHAT, json=body(ids), timeout=30).json()
    grown = [*ids, *first["choices"][0]["token_ids"], 9, 10]
    second = httpx.post(engine.base_url + CHAT, json=body(grown), timeout=30).json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == len(grown) - 3


def test_with_a_key_every_route_but_health_needs_it(tiny_dir: Path) -> None:
    with EmbeddedEngine(tiny_dir, api_key="secret") as engine:
        assert httpx.get(engine.base_url + "/health").status_code == 200
        for path in ("/v1/models", "/version"):
            refused = httpx.get(engine.base_url + path)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == 401
        assert httpx.post(engine.base_url + "/pause").status_code == 401
        with EngineClient(engine.base_url, api_key="secret") as control:
            assert control.model().id == "tiny"
        with EngineClient(engine.base_url, api_key="wrong") as control:
            with pytest.raises(EngineRefused) as refusal:
                control.pause()
            assert refusal.value.status == 401


def test_a_context_may_be_shorter_than_the_models(tiny_dir: Path) -> None:
    settings = EmbeddedSettings(max_model_len=64, limits=SchedulerLimits(max_running=2))
    with EmbeddedEngine(tiny_dir, settings=settings, served_model_name="short") as engine:
        with EngineClient(engine.base_url) as control:
            assert control.model().max_model_len == 64
            assert control.model().id == "short"
        reply = httpx.post(engine.base_url + CHAT, json=body([5] * 65), timeout=30)
        assert "maximum context length is 64 tokens" in reply.json()["error"]["message"]


def test_a_directory_without_a_model_does_not_start(tmp_path: Path, tiny_dir: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((tiny_dir / "tokenizer.json").read_text())
    engine = EmbeddedEngine(tmp_path)
    with pytest.raises(UnservableModel, match="no loadable causal LM"):
        engine.__enter__()


def test_scores_of_the_client_equal_a_plain_forward_pass(
    engine: EmbeddedEngine, reference: Reference, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("look the key up then add what it says")
    with EngineClient(engine.base_url) as control:
        scores = control.score(ids)
        expected = reference(ids)[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        np.testing.assert_allclose(scores, expected.numpy(), atol=1e-4)
        with pytest.raises(ValueError, match="two"):
            control.score(ids[:1])


@pytest.mark.usefixtures("warm_start")
def test_the_command_prints_its_url_and_stops_on_a_signal(tiny_dir: Path) -> None:
    command = [sys.executable, "-m", "bridle", "engine", "embedded", "--model", str(tiny_dir)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--port", "0", "--served-model-name", "mine", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        with EngineClient(url) as control:
            assert control.model().id == "mine"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def test_reasoning_is_split_off_when_the_engine_is_told_to(tiny_dir: Path) -> None:
    with EmbeddedEngine(tiny_dir, parse_thinking=True) as engine:
        opened = Tokenizer(tiny_dir).encode("look <think>\n")
        reply = httpx.post(engine.base_url + CHAT, json=body(opened), timeout=30).json()
        message = reply["choices"][0]["message"]
        assert message["reasoning"], "the prompt left the thinking open"
        events = []
        request = body(opened, stream=True)
        with httpx.stream("POST", engine.base_url + CHAT, json=request, timeout=30) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line[6:]))
        assert any(event["choices"][0]["delta"].get("reasoning") for event in events)
