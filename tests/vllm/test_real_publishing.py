"""New weights for a real vLLM: five in a row, tied and untied, and what happens when it goes wrong.

Files named ``test_real_…`` need vLLM and are marked ``vllm``; they run in the order of their names,
which is the order in which servers are needed.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from engine.client import EngineRefused
from engine.vllm import VllmControl
from trainer.config import PublishConfig
from trainer.model import load_policy, score_sequence
from trainer.publish import Publisher, default_probes
from trainer.swap import PublishError, mean_gap

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

TOLERANCE = 1e-3


def step(model: torch.nn.Module, seed: int) -> None:
    """Move every weight a little, as a training step does."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)


def publisher(control: VllmControl, model_dir: Path, directory: Path, **config: Any) -> Publisher:
    return Publisher(
        control,
        directory,
        run_id="run",
        served=model_dir,
        served_version=control.policy_version() or 0,
        probes=default_probes(300),
        config=PublishConfig(tolerance=TOLERANCE, **config),
        announce=control.stamp,
    )


def sampled_gap(base_url: str, model: torch.nn.Module) -> float:
    """Mean |engine − trainer| over a sampled reply to a prompt that was asked before.

    Unlike scoring, sampling reads the prefix cache, so a block of older weights shows here.
    """
    prompt = np.random.default_rng(7).integers(0, 300, 200)
    body = {
        "model": "policy",
        "prompt": prompt.tolist(),
        "max_tokens": 24,
        "logprobs": 0,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    reply = httpx.post(f"{base_url}/v1/completions", json=body, timeout=60, trust_env=False).json()
    choice = reply["choices"][0]
    ids = np.concatenate([prompt, choice["token_ids"]])
    with torch.no_grad():
        expected = score_sequence(model, ids).numpy()[-len(choice["token_ids"]) :]
    return float(np.abs(np.asarray(choice["logprobs"]["token_logprobs"]) - expected).mean())


@pytest.mark.parametrize("kind", ["policy", "untied"])
def test_each_of_five_publishes_is_what_the_engine_samples_from(
    vllm_servers: Any, tmp_path: Path, kind: str
) -> None:
    server = vllm_servers.use(kind)
    origin = vllm_servers.model_dir(kind)
    model = load_policy(origin)
    assert model.config.tie_word_embeddings == (kind == "policy")
    with VllmControl(server.base_url) as control:
        first = control.policy_version() or 0
        publishing = publisher(control, origin, tmp_path)
        for version in range(first + 1, first + 6):
            step(model, seed=version)
            began = time.monotonic()
            record = publishing.publish(model, version)
            seconds = time.monotonic() - began
            assert record.verified
            assert record.logprob_gap is not None
            sampled = sampled_gap(server.base_url, model)
            print(
                f"{kind} v{version}: scored {record.logprob_gap:.1e}, sampled {sampled:.1e}, "
                f"{seconds:.2f} s",
                file=sys.stderr,
            )
            assert record.logprob_gap <= TOLERANCE
            assert sampled <= TOLERANCE
            assert control.policy_version() == version
        # Back to the policy that the other tests know.
        publishing.publish(load_policy(origin), first + 6)


def swap(control: VllmControl, directory: Path) -> None:
    control.pause("wait")
    try:
        control.reload_weights(directory)
    finally:
        control.resume()


@pytest.mark.parametrize("wrong", ["missing", "cut", "another model"])
def test_weights_that_cannot_be_served_are_refused_and_the_old_ones_go_on(
    vllm_servers: Any, tmp_path: Path, wrong: str
) -> None:
    server = vllm_servers.use("policy")
    origin = vllm_servers.model_dir("policy")
    broken = tmp_path / "broken"
    if wrong != "missing":
        shutil.copytree(origin, broken)
        weights = broken / "model.safetensors"
        if wrong == "cut":
            weights.write_bytes(weights.read_bytes()[:-64])
        else:
            from trainer.tiny import TinyShape, make_policy

            make_policy(broken, TinyShape(), vocab_size=640)
    model = load_policy(origin)
    probes = default_probes(300)
    with torch.no_grad():
        expected = [score_sequence(model, probe).numpy() for probe in probes]
    with VllmControl(server.base_url) as control:
        with pytest.raises(EngineRefused, match="the weights were not changed"):
            swap(control, broken)
        assert mean_gap([control.score(probe.tolist()) for probe in probes], expected) <= TOLERANCE
        swap(control, origin)
        assert mean_gap([control.score(probe.tolist()) for probe in probes], expected) <= TOLERANCE


def test_a_seeded_request_longer_than_a_batch_does_not_end_the_engine(vllm_servers: Any) -> None:
    server = vllm_servers.use("policy")
    prompts = [[5 + each] * 1000 for each in range(4)]
    body = {"model": "policy", "prompt": prompts, "max_tokens": 2, "seed": 1}
    reply = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=60, trust_env=False)
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["choices"]) == 4


def test_a_publish_that_vllm_itself_gets_wrong_is_found_and_undone(
    vllm_servers: Any, tmp_path: Path
) -> None:
    """vLLM's own worker serves tied embeddings with the old output layer after a reload."""
    server = vllm_servers.use("careless")
    origin = vllm_servers.model_dir("careless")
    model = load_policy(origin)
    probes = default_probes(300)

    class PlainControl(VllmControl):
        def stamp(self, version: int) -> None:
            """vLLM's own worker has nowhere to write it."""

    with PlainControl(server.base_url) as control:
        before = [control.score(probe.tolist()) for probe in probes]
        step(model, seed=1)
        publishing = publisher(control, origin, tmp_path)
        with pytest.raises(PublishError, match="the engine serves version 0 again") as failed:
            publishing.publish(model, 1)
        print(failed.value, file=sys.stderr)
        assert mean_gap([control.score(probe.tolist()) for probe in probes], before) <= TOLERANCE
