"""New weights for a real vLLM: five in a row, and some that cannot be served."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from bridle.engine.contract.client import EngineRefused
from bridle.engine.vllm import VllmControl
from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.trainer.policy.model import load_policy

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_each_of_five_publishes_is_what_the_engine_samples_from(
    publishing: Callable[[str], Any],
) -> None:
    policy = publishing("policy")
    assert not policy.model.config.tie_word_embeddings
    policy.publish_five()


@pytest.mark.parametrize("wrong", ["missing", "cut", "another model"])
@pytest.mark.sampled(3)
def test_weights_that_cannot_be_served_are_refused_and_the_old_ones_go_on(
    publishing: Callable[[str], Any], tmp_path: Path, wrong: str
) -> None:
    policy = publishing("policy")
    broken = tmp_path / "broken"
    if wrong != "missing":
        shutil.copytree(policy.origin, broken)
        weights = broken / "model.safetensors"
        if wrong == "cut":
            weights.write_bytes(weights.read_bytes()[:-64])
        else:
            make_policy(broken, TinyShape(), vocab_size=640)
    with VllmControl(policy.server.base_url) as control:
        control.pause("wait")
        with pytest.raises(EngineRefused, match="the weights were not changed"):
            control.reload_weights(broken)
        control.resume()
        assert policy.scored_gap(control) <= 1e-3
        policy.step(seed=1)
        policy.publisher(control).publish(policy.model, (control.policy_version() or 0) + 1)
        control.pause("wait")
        control.reload_weights(policy.origin)
        control.resume()


@pytest.mark.sampled(0)
def test_adapters_are_served_merged_in(publishing: Callable[[str], Any]) -> None:
    policy = publishing("policy")
    policy.with_adapters()
    with VllmControl(policy.server.base_url) as control:
        first = control.policy_version() or 0
        before = policy.scored_gap(control)
        policy.step(seed=1, size=0.1)
        assert policy.scored_gap(control) > 0.01 > before
        publisher = policy.publisher(control)
        policy.publish_in_a_row(publisher, control, 2)
        publisher.publish(load_policy(policy.origin), first + 3)


def test_left_paused_by_a_trainer_that_died_it_is_published_to_without_being_asked(
    publishing: Callable[[str], Any],
) -> None:
    policy = publishing("policy")
    with VllmControl(policy.server.base_url) as control:
        publisher = policy.publisher(control)
        assert publisher.serves(policy.model)
        first = control.policy_version() or 0
        control.pause("wait")
        policy.step(seed=2)
        assert not publisher.serves(policy.model)
        assert publisher.publish(policy.model, first + 1).verified
        assert publisher.serves(policy.model)
        assert policy.sampled_gap() <= 1e-3
        publisher.publish(load_policy(policy.origin), first + 2)


@pytest.mark.sampled(0)
def test_seeded_requests_that_do_not_fit_one_batch_do_not_end_the_engine(vllm_servers: Any) -> None:
    server = vllm_servers.use("policy")
    prompts = [[5 + each] * 1000 for each in range(4)]
    body = {"model": "policy", "prompt": prompts, "max_tokens": 2, "seed": 1}
    reply = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=60, trust_env=False)
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["choices"]) == 4
