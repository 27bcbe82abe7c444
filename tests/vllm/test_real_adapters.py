"""LoRA adapters of several policies on a real vLLM, each version under a name of its own.

Files named ``test_real_…`` need vLLM and are marked ``vllm``. They run in the order of their names,
which is the order in which the shared servers are needed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from torch import nn

from bridle.engine.contract.client import EngineRefused
from bridle.engine.vllm import VllmLora
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.run.publishing import publishing
from bridle.run.stack import Stack
from bridle.run.training_plan import TrainingPlan
from bridle.store.reading.queries import Reader
from bridle.store.records import PolicyRecord, RunRecord
from bridle.store.writing.writer import Writer
from bridle.trainer.config import GrpoConfig, LoraConfig, PublishConfig
from bridle.trainer.policy.lora import adapters, save_adapters
from bridle.trainer.policy.model import ON_CPU, score_sequence, trainable_policy
from bridle.trainer.policy.weights import ModelWeights
from bridle.trainer.publish.lora import LoraPublisher
from bridle.trainer.publish.publisher import default_probes
from bridle.trainer.publish.swap import PublishError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PROBES = default_probes(250)


@pytest.fixture
def engine(vllm_servers: Any) -> Iterator[VllmLora]:
    with VllmLora(vllm_servers.use("policy").base_url) as engine:
        yield engine
        for name in engine.loras():
            engine.unload_lora(name)


class Role:
    """A policy in training on the server's model, and its publisher."""

    def __init__(self, name: str, model_dir: Path, engine: VllmLora, directory: Path) -> None:
        self.model = trainable_policy(model_dir, ON_CPU, LoraConfig(rank=8, alpha=16))
        self.announced: list[tuple[int, str]] = []
        self.recorded: list[PolicyRecord] = []
        self.publisher = LoraPublisher(
            engine,
            directory / name,
            PolicyRecord("run", 0, 0.0, path=str(model_dir), name=name),
            probes=PROBES,
            config=PublishConfig(),
            announce=lambda version, model: self.announced.append((version, model)),
            record=self.recorded.append,
        )

    def publish(self, version: int, seed: int | None = None) -> None:
        if seed is not None:
            torch.manual_seed(seed)
            with torch.no_grad():
                for name, parameter in adapters(self.model).items():
                    parameter.normal_(std=0.05 if "lora_B" in name else 0.2)
        self.publisher.publish(self.model, version)

    @property
    def served(self) -> str:
        return self.announced[-1][1]

    def sampled_gap(self, engine: VllmLora) -> float:
        """Mean |engine − trainer| over a reply to a prompt that was asked before.

        Unlike scoring, sampling reads the prefix cache.
        """
        return sampled_gap(engine, self.served, self.model)


def sampled_gap(engine: VllmLora, served: str, model: nn.Module) -> float:
    prompt = np.random.default_rng(7).integers(0, 250, 200)
    body = {"model": served, "prompt": prompt.tolist(), "max_tokens": 24, "logprobs": 0}
    body |= {"return_token_ids": True, "ignore_eos": True}
    url = f"{engine.base_url}/v1/completions"
    choice = httpx.post(url, json=body, timeout=60, trust_env=False).json()["choices"][0]
    sampled = choice["token_ids"]
    with torch.no_grad():
        scores = score_sequence(model, np.concatenate([prompt, sampled])).numpy()
    found = np.asarray(choice["logprobs"]["token_logprobs"])
    return float(np.abs(found - scores[-len(sampled) :]).mean())


@pytest.fixture
def role(vllm_servers: Any, engine: VllmLora, tmp_path: Path) -> Any:
    model_dir = vllm_servers.model_dir("policy")
    return lambda name: Role(name, model_dir, engine, tmp_path)


def scores(engine: VllmLora, model: str) -> list[Any]:
    return [engine.score(probe.tolist(), model=model) for probe in PROBES]


def test_two_policies_are_published_one_by_one_to_one_engine(engine: VllmLora, role: Any) -> None:
    engine.require_lora(8)
    planner, worker = role("planner"), role("worker")
    plain = scores(engine, "policy")
    planner.publish(0)
    np.testing.assert_allclose(
        np.concatenate(scores(engine, planner.served)), np.concatenate(plain), atol=1e-5
    )
    worker.publish(1, seed=1)
    before = scores(engine, worker.served)
    assert np.abs(np.concatenate(before) - np.concatenate(plain)).mean() > 0.01
    for version in (1, 2, 3):
        planner.publish(version, seed=10 + version)
        assert planner.recorded[-1].verified
        assert planner.recorded[-1].logprob_gap <= 1e-4
        assert planner.sampled_gap(engine) <= 1e-3
    for name, expected in ((worker.served, before), ("policy", plain)):
        for now, then in zip(scores(engine, name), expected, strict=True):
            assert np.array_equal(now, then), "another policy's publish changes nothing"
    assert worker.sampled_gap(engine) <= 1e-3

    names = [name.rpartition("-")[0] for name in engine.loras()]
    assert names == ["worker-v00000001", "planner-v00000002", "planner-v00000003"]
    kept = sorted(path.name for path in planner.publisher.directory.iterdir())
    assert kept == ["v00000002", "v00000003"]
    assert planner.publisher.serves(planner.model)
    assert not planner.publisher.serves(worker.model)


@pytest.mark.sampled(0)
def test_a_name_that_is_loaded_again_is_served_from_stale_blocks_and_a_publish_is_not(
    engine: VllmLora, role: Any
) -> None:
    """The reason for a name for each set of weights: vLLM's prefix cache knows names and paths."""
    one = role("one")
    one.publish(1, seed=1)
    assert one.sampled_gap(engine) <= 1e-3
    name, path = one.publisher.served[-1]
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in adapters(one.model).values():
            parameter.add_(0.1 * torch.randn_like(parameter))
    one.publisher.engine.unload_lora(name)
    save_adapters(one.model, path, path)
    engine.load_lora(name, path)
    with torch.no_grad():
        fresh = [score_sequence(one.model, probe).numpy() for probe in PROBES]
    found = np.concatenate(scores(engine, name))
    np.testing.assert_allclose(found, np.concatenate(fresh), atol=1e-3)
    assert one.sampled_gap(engine) > 1e-2, "scored anew, and sampled after blocks of the old one"
    # The same number at the same path, as a run that begins anew has them.
    one.publish(1)
    assert one.sampled_gap(engine) <= 1e-3


def test_an_adapter_that_is_refused_serves_no_call(
    engine: VllmLora, role: Any, vllm_servers: Any
) -> None:
    one = role("one")
    one.publish(1, seed=1)
    served = one.served
    other = role("other")
    one.publisher.config = PublishConfig(tolerance=1e-12)
    with pytest.raises(PublishError, match="has served no call") as refused:
        one.publish(2, seed=2)
    assert refused.value.gap > 1e-12
    assert engine.loras() == [served]
    assert one.announced == [(1, served)]
    assert [(each.version, each.verified) for each in one.recorded] == [(1, True), (2, False)]

    with pytest.raises(EngineRefused, match=r"up to rank 8.*lora_rank=16.*--max-lora-rank 16"):
        engine.require_lora(16)
    other.model = trainable_policy(vllm_servers.model_dir("policy"), ON_CPU, LoraConfig(rank=16))
    with pytest.raises(PublishError, match="LoRA rank 16 is greater than max_lora_rank 8"):
        other.publish(1)
    assert other.announced == []
    with pytest.raises(EngineRefused):
        engine.load_lora("nothing", other.publisher.directory / "nowhere")
    assert engine.loras() == [served]


def test_one_policy_of_a_run_is_published_as_an_adapter_to_running_services(
    engine: VllmLora, vllm_servers: Any, tmp_path: Path
) -> None:
    model_dir, store = vllm_servers.model_dir("policy"), str(tmp_path / "bridle.db")
    plan = TrainingPlan(
        policy=model_dir,
        directory=tmp_path,
        store=store,
        run_id="run",
        config=GrpoConfig(lora=LoraConfig(rank=4), publish=PublishConfig(through="lora")),
    )
    model = trainable_policy(model_dir, ON_CPU, plan.config.lora)
    message = [{"role": "user", "content": "Hi"}]
    with (
        ProxyServer(ProxySettings(engine.base_url, store), grace_s=1) as proxy,
        Writer(store) as writer,
        Reader(store) as reader,
    ):
        stack = Stack(engine.base_url, proxy.base_url, kind="vllm")
        writer.add_sync(RunRecord("run", "train", 1.0))
        with publishing(plan, stack, ModelWeights(model), writer) as publisher:
            publisher.publish(model, 1)
            assert stack.version() == 1
            asked = {"model": "policy", "messages": message, "max_tokens": 2}
            url = f"{proxy.base_url}/s/one/v1/chat/completions"
            reply = httpx.post(url, json=asked, timeout=60, trust_env=False)
            assert reply.status_code == 200, reply.text
        (kept,) = reader.policies("run")
        (session,) = reader.sessions()
        (call,) = reader.calls(session.id)
    assert (kept.version, kept.verified) == (1, True)
    assert (call.version_start, call.model_served) == (1, engine.loras()[0])
    sent = sum(path.stat().st_size for path in Path(str(kept.path)).iterdir())
    whole = (model_dir / "model.safetensors").stat().st_size
    print(f"published {sent} bytes instead of {whole}", file=sys.stderr)
    assert sent < whole / 2


@pytest.mark.sampled(0)
def test_a_restarted_engine_serves_no_version_until_one_is_published(
    engine: VllmLora, role: Any
) -> None:
    one = role("one")
    assert not one.publisher.serves(one.model)
    one.publish(1, seed=1)
    assert one.publisher.serves(one.model)
    engine.unload_lora(one.served)  # as a restart does
    assert not one.publisher.serves(one.model)
    one.publish(1)
    assert one.publisher.serves(one.model)
    assert one.announced[0] == one.announced[1]
