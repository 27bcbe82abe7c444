"""LoRA: adapters are trained, the policy below them is not, and what leaves is one merged model."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM, Qwen3MoeConfig

from bridle.engine.contract.client import EngineClient
from bridle.engine.embedded import EmbeddedEngine
from bridle.engine.embedded.model import load_model
from bridle.store.records import PolicyRecord
from bridle.trainer.config import (
    ComputeConfig,
    GrpoConfig,
    LoraConfig,
    LossConfig,
    OptimizerConfig,
    SftConfig,
)
from bridle.trainer.learner.checkpoint import (
    CheckpointError,
    Progress,
    load_checkpoint,
    save_checkpoint,
)
from bridle.trainer.learner.learner import Learner
from bridle.trainer.learner.optimizer import make_optimizer
from bridle.trainer.learner.ranks import learning
from bridle.trainer.learner.sft_update import SftExample
from bridle.trainer.policy.compute import UnsupportedCompute
from bridle.trainer.policy.lora import adapters, merged_state, save_adapters, without_adapters
from bridle.trainer.policy.model import (
    ON_CPU,
    UnsupportedModel,
    checkpoint_tensors,
    load_policy,
    save_policy,
    score_sequence,
    trainable_policy,
    vocabulary_size,
)
from bridle.trainer.publish.publisher import Publisher, default_probes
from bridle.trainer.publish.replicas import ReplicaPublisher
from bridle.trainer.sft.sft import train_sft

IDS = np.arange(5, 40)
LORA = LoraConfig(rank=4, alpha=8)
IN_BFLOAT16 = ComputeConfig(device="cpu", precision="bfloat16")


@pytest.fixture(scope="session")
def mixture_directory(tmp_path_factory):
    """A policy whose layers have four experts."""
    directory = tmp_path_factory.mktemp("mixture")
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.fixture
def adapted(policy_directory):
    return trainable_policy(policy_directory, ON_CPU, LORA)


def tuned(model, epochs=3):
    config = SftConfig(epochs=epochs, optimizer=OptimizerConfig(learning_rate=1e-2))
    train_sft(Learner(model, config), [SftExample(IDS, np.arange(len(IDS)) > 0)], config)
    return model


def scores(model):
    return score_sequence(model, IDS).detach()


def test_it_begins_as_the_policy_and_trains_every_linear_layer_but_the_head(
    adapted, policy_directory
):
    torch.testing.assert_close(scores(adapted), scores(load_policy(policy_directory)))
    trained = {name for name, each in adapted.named_parameters() if each.requires_grad}
    assert trained == set(adapters(adapted))
    layers = {name.split(".lora_")[0].split("layers.")[1] for name in trained}
    projections = ["self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o"]
    projections += ["mlp.gate", "mlp.up", "mlp.down"]
    assert layers == {f"{n}.{each}_proj" for n in range(2) for each in projections}


def test_the_weights_below_stay_and_the_merged_model_scores_the_same(
    adapted, policy_directory, tmp_path
):
    before = load_policy(policy_directory)
    tuned(adapted)
    below = {n: each for n, each in adapted.state_dict().items() if "lora_" not in n}
    for name, tensor in before.state_dict().items():
        layer = name.removesuffix("weight") + "base_layer.weight"
        assert torch.equal(below[layer if layer in below else name], tensor)
    assert float((scores(adapted) - scores(before)).abs().mean()) > 0.1
    save_policy(adapted, tmp_path / "merged")
    again = load_policy(tmp_path / "merged")
    assert again.state_dict().keys() == before.state_dict().keys()
    torch.testing.assert_close(scores(again), scores(adapted), rtol=1e-4, atol=1e-4)
    assert checkpoint_tensors(adapted).keys() == checkpoint_tensors(before).keys()


@pytest.mark.parametrize("directory", ["policy_directory", "mixture_directory"])
@pytest.mark.parametrize("compute", [ON_CPU, IN_BFLOAT16], ids=["float32", "bfloat16"])
def test_with_its_adapters_off_it_is_the_policy_that_it_began_as(directory, compute, request):
    directory = request.getfixturevalue(directory)
    model = trainable_policy(directory, compute, LORA)
    began = scores(model)
    with torch.no_grad():
        for adapter in adapters(model).values():
            adapter.add_(0.1)
    trained = scores(model)
    assert float((trained - began).abs().mean()) > 0.1
    near = 1e-6 if compute == ON_CPU else 0.05
    with without_adapters(model):
        found = scores(model)
    torch.testing.assert_close(
        found, scores(load_policy(directory, compute=compute)), rtol=near, atol=near
    )
    assert torch.equal(scores(model), trained)
    with pytest.raises(KeyboardInterrupt), without_adapters(model):
        raise KeyboardInterrupt
    assert torch.equal(scores(model), trained)
    assert {n for n, each in model.named_parameters() if each.requires_grad} == set(adapters(model))


def test_the_reference_of_a_kl_penalty_is_no_second_model(policy_directory, monkeypatch):
    config = GrpoConfig(compute=ON_CPU, lora=LORA, loss=LossConfig(kl_coefficient=0.1))
    load, loaded = AutoModelForCausalLM.from_pretrained, []

    def counted(directory, **options):
        loaded.append(directory)
        return load(directory, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", counted)
    with learning(policy_directory, config) as learner:
        assert learner.has_reference
        assert len(loaded) == 1
    with learning(policy_directory, dataclasses.replace(config, lora=LoraConfig())) as learner:
        assert learner.has_reference
        assert len(loaded) == 1 + 2


def test_adapters_begin_as_the_seed_says_and_draw_nothing_from_torchs_generator(policy_directory):
    state = torch.get_rng_state()
    one, same, other = (
        adapters(trainable_policy(policy_directory, ON_CPU, LORA, seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(one, same, rtol=0, atol=0)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_in_bfloat16_the_weights_below_are_kept_in_it_and_adapters_are_not(policy_directory):
    compute = ComputeConfig(device="cpu", precision="bfloat16", recompute=True)
    model = trainable_policy(policy_directory, compute, LORA)
    kept = {each.dtype for each in model.parameters() if not each.requires_grad}
    assert kept == {torch.bfloat16}
    assert {each.dtype for each in adapters(model).values()} == {torch.float32}
    before = scores(model)
    tuned(model)
    assert float((scores(model) - before).mean()) > 0.1
    assert {each.dtype for each in merged_state(model).values()} == {torch.bfloat16}


def test_resuming_equals_never_having_stopped(policy_directory, tmp_path):
    def step(model, optimizer):
        (-score_sequence(model, IDS).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()

    def fresh(seed):
        model = trainable_policy(policy_directory, ON_CPU, LORA, seed)
        return model, make_optimizer(model, OptimizerConfig(learning_rate=1e-2))

    straight, optimizer = fresh(1)
    for number in range(4):
        step(straight, optimizer)
        if number == 1:
            path = save_checkpoint(tmp_path, straight, optimizer, Progress(2, 2))
    resumed, optimizer = fresh(2)
    assert load_checkpoint(path, resumed, optimizer) == Progress(2, 2)
    for _ in range(2):
        step(resumed, optimizer)
    torch.testing.assert_close(resumed.state_dict(), straight.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    "lora",
    [LoraConfig(), LoraConfig(rank=2, alpha=4), LoraConfig(rank=4, alpha=9)],
    ids=["none", "rank", "alpha"],
)
@pytest.mark.parametrize("way", ["there", "back"])
def test_a_checkpoint_with_other_adapters_is_refused(policy_directory, tmp_path, lora, way):
    saved, asked = (LORA, lora) if way == "there" else (lora, LORA)
    model = trainable_policy(policy_directory, ON_CPU, saved)
    optimizer = make_optimizer(model, OptimizerConfig(learning_rate=1e-3))
    path = save_checkpoint(tmp_path, model, optimizer, Progress(1, 1))
    model = trainable_policy(policy_directory, ON_CPU, asked)
    with pytest.raises(CheckpointError, match="other adapters"):
        load_checkpoint(path, model, make_optimizer(model, OptimizerConfig(learning_rate=1e-3)))


def test_an_engine_serves_it_merged(chat_directory, tmp_path):
    model = trainable_policy(chat_directory, ON_CPU, LORA)
    probes = default_probes(vocabulary_size(model))
    serving = PolicyRecord("run", 0, 0.0, path=str(chat_directory))
    with EmbeddedEngine(chat_directory) as engine, EngineClient(engine.base_url) as client:
        publisher = Publisher(client, tmp_path, serving, probes=probes)
        tuned(model)
        record = publisher.publish(model, 1)
        assert record.verified
        assert record.logprob_gap < 1e-5
        engine_scores = client.score(IDS.tolist())
    np.testing.assert_allclose(engine_scores, scores(model).numpy(), atol=1e-4)


def test_adapters_alone_are_what_peft_loads_onto_the_policy(policy_directory, tmp_path):
    model = tuned(trainable_policy(policy_directory, ON_CPU, LORA))
    (tmp_path / "alone").mkdir()
    save_adapters(model, tmp_path / "alone", policy_directory)
    again = PeftModel.from_pretrained(load_policy(policy_directory), tmp_path / "alone")
    assert torch.equal(scores(again.get_base_model()), scores(model))


def test_what_engines_do_not_load_as_adapters_is_refused(
    policy_directory, mixture_directory, tmp_path
):
    with pytest.raises(UnsupportedCompute, match=r"set training\.lora\.rank"):
        save_adapters(load_policy(policy_directory), tmp_path, policy_directory)
    mixture = trainable_policy(mixture_directory, ON_CPU, LORA)
    with pytest.raises(UnsupportedCompute, match="experts that are one tensor"):
        save_adapters(mixture, tmp_path, mixture_directory)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("compute", [ON_CPU, IN_BFLOAT16], ids=["float32", "bfloat16"])
def test_experts_that_are_one_tensor_are_merged_one_by_one(mixture_directory, tmp_path, compute):
    model = tuned(trainable_policy(mixture_directory, compute, LORA))
    assert any(".experts." in name for name in adapters(model))
    save_policy(model, tmp_path / "merged")
    original, merged = (
        load_file(directory / "model.safetensors")
        for directory in (mixture_directory, tmp_path / "merged")
    )
    assert {n: each.shape for n, each in merged.items()} == {
        n: each.shape for n, each in original.items()
    }
    for name in ("gate_proj", "up_proj", "down_proj"):
        expert = f"model.layers.0.mlp.experts.0.{name}.weight"
        assert not torch.equal(merged[expert].float(), original[expert])
    again = load_policy(tmp_path / "merged", compute=compute)
    near = 1e-4 if compute == ON_CPU else 0.05
    torch.testing.assert_close(scores(again), scores(model), rtol=near, atol=near)


def test_engines_are_checked_at_the_same_time_and_the_model_computes_once_at_a_time(
    mixture_directory, tmp_path
):
    class Engine:
        def pause(self, **_how): ...
        def resume(self): ...
        def is_paused(self):
            return False

        def reload_weights(self, directory):
            self.model = load_model(directory, torch.float32)

        def score(self, token_ids):
            return score_sequence(self.model, np.asarray(token_ids)).detach().numpy()

    engines = {"one": Engine(), "other": Engine()}
    for engine in engines.values():
        engine.reload_weights(mixture_directory)
    model = trainable_policy(mixture_directory, ON_CPU, LORA)
    experts = model.model.layers[0].mlp.experts.get_base_layer()
    experts.register_forward_pre_hook(lambda *_: time.sleep(0.05))
    serving = PolicyRecord("run", 0, 0.0, path=str(mixture_directory))
    publisher = ReplicaPublisher(engines, tmp_path, serving, probes=[IDS])
    for version in (1, 2):
        assert publisher.publish(tuned(model, epochs=1), version).logprob_gap < 1e-4
        assert publisher.lagging == {}


def test_a_model_that_cannot_have_adapters_is_refused(tmp_path):
    config = MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=64, state_size=4)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="cannot have adapters"):
        trainable_policy(tmp_path, ON_CPU, LORA)


def test_a_rank_of_zero_trains_all_weights(policy_directory):
    model = trainable_policy(policy_directory, ON_CPU, dataclasses.replace(LORA, rank=0))
    assert not adapters(model)
    assert all(each.requires_grad for each in model.parameters())
