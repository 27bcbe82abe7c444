"""Test a policy on other devices, in bfloat16, and with recomputed layers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed
from torch.distributed import HashStore
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM, OPTConfig

from bridle.trainer.batch.packing import make_packs
from bridle.trainer.config import ComputeConfig, LoraConfig, PackingConfig, PublishConfig, SftConfig
from bridle.trainer.learner.learner import Learner
from bridle.trainer.learner.sft_update import SftExample
from bridle.trainer.policy.compute import UnsupportedCompute, choose_device, choose_devices, place
from bridle.trainer.policy.exactness import exact_packing
from bridle.trainer.policy.model import (
    ON_CPU,
    load_policy,
    score_pack,
    score_sequence,
    trainable_policy,
)
from bridle.trainer.policy.sharding import Share, share_of
from bridle.trainer.publish.swap import TOLERANCE, TOLERANCE_IN_BFLOAT16, VerifiedSwap
from bridle.trainer.sft.sft import train_sft

IDS = np.arange(5, 60)
IN_BFLOAT16 = ComputeConfig(device="cpu", precision="bfloat16")
RECOMPUTED = ComputeConfig(device="cpu", recompute=True)


def gradients(model):
    (-score_sequence(model, IDS).sum()).backward()
    return {name: each.grad for name, each in model.named_parameters()}


@pytest.mark.loop
@pytest.mark.sampled(0)
def test_another_device_trains_the_same_and_no_step_mixes_devices(tmp_path):
    script = Path(__file__).parent / "second_device.py"
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["device"] == "second"
    assert told["mixed"] is False
    assert told["moved"] > 1e-3
    assert told["apart"] < 1e-5


def test_without_an_accelerator_auto_is_the_cpu_in_float32(policy_directory):
    if torch.accelerator.is_available():
        pytest.skip("this machine has one")
    assert choose_device("auto") == torch.device("cpu")
    model = load_policy(policy_directory, compute=ComputeConfig())
    plain = load_policy(policy_directory)
    assert score_sequence(model, IDS).tolist() == score_sequence(plain, IDS).tolist()


@pytest.mark.parametrize("name", ["cuda:77", "nonsense", "meta:x"])
def test_a_device_that_is_not_here_is_named(name):
    with pytest.raises(UnsupportedCompute, match=f"no device '{name}'"):
        choose_device(name)


@pytest.mark.parametrize(("device", "present"), [("cuda:1", "cuda:1"), ("cuda", None)])
def test_the_trainers_gpu_is_the_present_one(monkeypatch, device, present):
    """NCCL's end of a weight transfer would take the engine's GPU otherwise."""

    class OnGpu(torch.nn.Linear):
        def to(self, _device):
            return self

    made = []
    monkeypatch.setattr("bridle.trainer.policy.compute.choose_device", torch.device)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: made.append(str(device)))
    place(OnGpu(2, 2), ComputeConfig(device=device))
    assert made == ([] if present is None else [present])


def test_an_accelerators_devices_are_counted_without_a_tensor_on_them(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert [str(choose_device(name)) for name in ("cuda", "cuda:1")] == ["cuda:0", "cuda:1"]
    with pytest.raises(UnsupportedCompute, match="no device 'cuda:2': there are 2 here"):
        choose_device("cuda:2")
    assert choose_device("cpu") == torch.device("cpu")


def test_several_devices_are_named_one_by_one_or_as_a_range(monkeypatch):
    monkeypatch.setattr("bridle.trainer.policy.compute.choose_device", torch.device)
    names = ["cuda", "cpu,cpu", "cuda:0-2", " cuda:1, cuda:3-4"]
    found = [[str(device) for device in choose_devices(name)] for name in names]
    assert found == [
        ["cuda"],
        ["cpu", "cpu"],
        ["cuda:0", "cuda:1", "cuda:2"],
        ["cuda:1", "cuda:3", "cuda:4"],
    ]


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ("meta:0,meta:0-1", "names a device twice"),
        ("cpu,meta", "different kinds of device"),
        ("meta:2-1", "meta:2-1 is no range"),
        ("cpu,", "no device ''"),
        ("cpu,cuda:77", "no device 'cuda:77'"),
    ],
)
def test_devices_that_no_policy_is_spread_over_are_refused(names, why):
    with pytest.raises(UnsupportedCompute, match=why):
        choose_devices(names)


def test_each_process_keeps_a_part_of_every_weight(policy_directory):
    distributed.init_process_group("fake", store=HashStore(), rank=1, world_size=4)
    try:
        model = load_policy(policy_directory, mesh=init_device_mesh("cpu", (4,)))
        parts = {name: each.to_local().numel() for name, each in model.named_parameters()}
        whole = {name: each.numel() for name, each in model.named_parameters()}
        assert parts == {name: size / 4 for name, size in whole.items()}
        assert share_of(model) == Share(rank=1, processes=4)
    finally:
        distributed.destroy_process_group()


def test_bfloat16_rounds_what_is_multiplied_and_not_the_weights(policy_directory):
    exact = load_policy(policy_directory)
    rounded = load_policy(policy_directory, compute=IN_BFLOAT16)
    assert {each.dtype for each in rounded.parameters()} == {torch.float32}
    gap = (score_sequence(rounded, IDS) - score_sequence(exact, IDS)).detach().abs()
    assert 0 < float(gap.mean()) < 0.01
    assert score_sequence(rounded, IDS).dtype == torch.float32
    assert {each.dtype for each in gradients(rounded).values()} == {torch.float32}


@pytest.mark.parametrize("layout", ["tree", "flat", "padded"])
def test_in_bfloat16_packs_are_scored_as_lone_sequences_are(policy_directory, layout):
    model = load_policy(policy_directory, compute=IN_BFLOAT16)
    packing = PackingConfig(layout=layout)
    assert exact_packing(model, packing) == packing
    example = SftExample(IDS, np.arange(len(IDS)) > 0)
    (pack,) = make_packs([example], packing)
    gap = score_pack(model, pack).logprobs - score_sequence(model, IDS)[pack.offsets - 1]
    assert float(gap.detach().abs().max()) < 0.05


def test_small_updates_are_not_rounded_away(policy_directory):
    """The type bfloat16 does not hold a change by a thousandth in a weight around one."""
    model = load_policy(policy_directory, compute=IN_BFLOAT16)
    norm = dict(model.named_parameters())["model.norm.weight"]
    before = norm.detach().clone()
    example = SftExample(IDS, np.arange(len(IDS)) > 0)
    config = SftConfig(epochs=3)
    train_sft(Learner(model, config), [example], config)
    change = (norm.detach() - before).abs()
    assert 0 < float(change.max()) < 2**-9
    assert torch.equal(norm.detach().bfloat16(), before.bfloat16())


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=2)], ids=["all", "adapters"])
def test_recomputed_layers_give_the_same_gradients_for_a_second_pass(policy_directory, lora):
    kept = trainable_policy(policy_directory, ON_CPU, lora)
    recomputed = trainable_policy(policy_directory, RECOMPUTED, lora)
    passes = []
    recomputed.model.layers[0].mlp.register_forward_pre_hook(lambda *_: passes.append(1))
    expected, found = gradients(kept), gradients(recomputed)
    assert len(passes) == 2
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["Qwen3", "OPT"])
def test_a_recomputed_policy_still_drops_nothing_out(policy_directory, family):
    """OPT's layers drop out by themselves, not by modules inside them."""
    config = AutoConfig.from_pretrained(policy_directory)
    if family == "OPT":
        config = OPTConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, ffn_dim=48)
        config.num_attention_heads, config.word_embed_proj_dim, config.dropout = 4, 32, 0.9
    config.attention_dropout = 0.9
    model = AutoModelForCausalLM.from_config(config, attn_implementation="bridle_tree").train()
    placed = place(model, RECOMPUTED)
    once, again = (score_sequence(placed, IDS) for _ in range(2))
    assert torch.equal(once, again)


def test_a_model_without_layers_to_recompute_is_refused():
    with pytest.raises(UnsupportedCompute, match="Linear has no layers"):
        place(torch.nn.Linear(2, 2), RECOMPUTED)


@pytest.mark.parametrize(
    ("compute", "tolerance"),
    [(ComputeConfig(device="cpu"), TOLERANCE), (IN_BFLOAT16, TOLERANCE_IN_BFLOAT16)],
)
def test_engines_may_differ_by_the_rounding_of_what_computes(policy_directory, compute, tolerance):
    class Engine:
        gap = 0.0

        def is_paused(self):
            return False

        def score(self, token_ids):
            scores = score_sequence(model, np.asarray(token_ids)).detach().numpy()
            return scores + np.float32(self.gap)

    model = load_policy(policy_directory, compute=compute)
    engine = Engine()
    swap = VerifiedSwap(engine, [IDS], PublishConfig(), lambda _version: None)
    engine.gap = tolerance * 0.9
    assert swap.serves(model)
    engine.gap = tolerance * 1.2
    assert not swap.serves(model)
    strict = VerifiedSwap(engine, [IDS], PublishConfig(tolerance=1.0), lambda _version: None)
    assert strict.serves(model)
