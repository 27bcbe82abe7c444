import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.trainer.config import OptimizerConfig
from bridle.trainer.learner.checkpoint import (
    CheckpointError,
    Progress,
    checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from bridle.trainer.learner.optimizer import make_optimizer
from bridle.trainer.policy.durable import NotWritten, atomic_directory
from bridle.trainer.policy.model import load_policy, save_policy

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()


def train(model, optimizer, steps):
    """Steps on inputs drawn from torch's generator, so that its state matters too."""
    for _ in range(steps):
        ids = torch.randint(0, 64, (2, 16))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def fresh(policy_directory, optimizer="adamw"):
    model = load_policy(policy_directory)
    return model, make_optimizer(model, OptimizerConfig(optimizer, 1e-3, weight_decay=0.01))


FACTORIES = """
import torch


def adafactor(parameters, *, lr, weight_decay, **_others):
    return torch.optim.Adafactor(parameters, lr=lr, weight_decay=weight_decay)


def momentum(parameters, *, lr, betas, weight_decay, **_others):
    return torch.optim.SGD(parameters, lr, betas[0], weight_decay=weight_decay)


class Opaque(torch.optim.SGD):
    def __init__(self, parameters, *, lr, **_others):
        super().__init__(parameters, lr)
        self.state[self.param_groups[0]["params"][0]]["kept"] = Opaque
"""


@pytest.fixture
def factories(tmp_path):
    """A user's file of optimizers."""
    file = tmp_path / "factories.py"
    (muon,) = (each for each in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "Muon" in each)
    file.write_text(FACTORIES + muon)
    return file


@pytest.mark.parametrize(
    "name", ["adamw", "FILE:adafactor", "FILE:momentum", "FILE:muon", "torch.optim:NAdam"]
)
def test_resuming_equals_never_having_stopped_bit_for_bit(
    policy_directory, tmp_path, factories, name
):
    name = name.replace("FILE", str(factories))
    torch.manual_seed(7)
    straight, optimizer = fresh(policy_directory, name)
    train(straight, optimizer, 4)

    torch.manual_seed(7)
    first, optimizer = fresh(policy_directory, name)
    train(first, optimizer, 2)
    path = save_checkpoint(tmp_path, first, optimizer, Progress(2, 5, {"best": 0.5}))
    torch.manual_seed(99)
    resumed, optimizer = fresh(policy_directory, name)
    assert load_checkpoint(path, resumed, optimizer) == Progress(2, 5, {"best": 0.5})
    train(resumed, optimizer, 2)

    for expected, found in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(expected, found)


def test_moments_in_eight_bits_are_resumed_bit_for_bit(tmp_path):
    optim = pytest.importorskip("torchao.optim")
    shape = TinyShape(hidden=64, layers=1, heads=2, kv_heads=2, intermediate=64, context=64)
    make_policy(tmp_path / "policy", shape, vocab_size=64, seed=1)
    straight, optimizer = fresh(tmp_path / "policy", "torchao.optim:AdamW8bit")
    train(straight, optimizer, 2)
    moments = optimizer.state[straight.model.layers[0].mlp.up_proj.weight]
    assert isinstance(moments["exp_avg"], optim.subclass_8bit.OptimState8bit)
    path = save_checkpoint(tmp_path, straight, optimizer, Progress(2, 2))
    train(straight, optimizer, 2)
    resumed, optimizer = fresh(tmp_path / "policy", "torchao.optim:AdamW8bit")
    load_checkpoint(path, resumed, optimizer)
    train(resumed, optimizer, 2)
    torch.testing.assert_close(resumed.state_dict(), straight.state_dict(), rtol=0, atol=0)


def test_a_model_whose_files_have_other_names_than_its_parameters_is_resumed(tmp_path):
    """The experts of a layer are one tensor in memory; in a checkpoint each has its own."""
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=16,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=True,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "policy")
    trained, optimizer = fresh(tmp_path / "policy")
    train(trained, optimizer, 1)
    path = save_checkpoint(tmp_path / "checkpoints", trained, optimizer, Progress(1, 1))
    resumed, optimizer = fresh(tmp_path / "policy")
    assert load_checkpoint(path, resumed, optimizer) == Progress(1, 1)
    torch.testing.assert_close(resumed.state_dict(), trained.state_dict(), rtol=0, atol=0)


def test_every_random_generator_goes_on_where_it_was(policy_directory, tmp_path):
    model, optimizer = fresh(policy_directory)
    path = save_checkpoint(tmp_path, model, optimizer, Progress(1, 1))

    def draws():
        return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()

    expected = draws()
    load_checkpoint(path, model, optimizer)
    assert draws() == expected


def test_only_the_newest_checkpoints_are_kept(policy_directory, tmp_path):
    model, optimizer = fresh(policy_directory)
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, model, optimizer, Progress(step, step), keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000002", "step-00000010"]


def test_a_checkpoint_is_a_model_directory(chat_directory, tmp_path):
    model = load_policy(chat_directory)
    optimizer = make_optimizer(model, OptimizerConfig(learning_rate=1e-3))
    path = save_checkpoint(
        tmp_path, model, optimizer, Progress(1, 1), tokenizer_from=chat_directory
    )
    again = load_policy(path / "policy")
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert (path / "policy" / "tokenizer.json").exists()


def test_a_policy_in_16_bits_is_kept_in_float32_and_resumed_bit_for_bit(policy_directory, tmp_path):
    save_policy(load_policy(policy_directory, dtype="bfloat16"), tmp_path / "policy")
    straight, optimizer = fresh(tmp_path / "policy")
    train(straight, optimizer, 1)
    path = save_checkpoint(tmp_path, straight, optimizer, Progress(1, 1))
    kept = load_file(path / "policy" / "model.safetensors")
    assert {each.dtype for each in kept.values()} == {torch.float32}
    train(straight, optimizer, 1)
    resumed, optimizer = fresh(tmp_path / "policy")
    load_checkpoint(path, resumed, optimizer)
    train(resumed, optimizer, 1)
    torch.testing.assert_close(resumed.state_dict(), straight.state_dict(), rtol=0, atol=0)


def test_a_write_that_fails_leaves_the_old_directory_and_no_scraps(tmp_path):
    target = tmp_path / "it"
    with atomic_directory(target) as scratch:
        (scratch / "file").write_text("old")

    def interrupted():
        with atomic_directory(target) as scratch:
            (scratch / "file").write_text("half of the n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["it"]
    assert (target / "file").read_text() == "old"


def test_a_disk_that_is_full_is_said_in_a_line_and_leaves_what_was_there(
    policy_directory, tmp_path
):
    model, optimizer = fresh(policy_directory)
    train(model, optimizer, 1)
    save_checkpoint(tmp_path, model, optimizer, Progress(1, 1))
    policy = (tmp_path / "step-00000001" / "policy" / "model.safetensors").stat().st_size

    def save_with_room_for(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        with pytest.raises(NotWritten, match=r"step-00000002 cannot be written: [^\n]+$"):
            save_checkpoint(tmp_path, model, optimizer, Progress(2, 2))

    for size in (100, policy // 2, policy):  # ends in the configuration, weights and optimizer
        process = multiprocessing.get_context("fork").Process(
            target=save_with_room_for, args=(size,)
        )
        process.start()
        process.join()
        assert process.exitcode == 0
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    load_checkpoint(tmp_path / "step-00000001", *fresh(policy_directory))


def test_what_a_killed_process_was_writing_is_removed_by_the_next_write(tmp_path):
    def write(name, kill):
        with atomic_directory(tmp_path / name) as scratch:
            (scratch / "file").write_text("half of the weights")
            if kill:
                os.kill(os.getpid(), signal.SIGKILL)

    writer = multiprocessing.get_context("fork").Process(target=write, args=("one", True))
    writer.start()
    writer.join()
    assert [path.suffix for path in tmp_path.iterdir()] == [".tmp"]
    write("two", kill=False)
    assert [path.name for path in tmp_path.iterdir()] == ["two"]


def test_a_directory_that_is_no_checkpoint_is_refused(policy_directory, tmp_path):
    model, optimizer = fresh(policy_directory)
    with pytest.raises(CheckpointError, match=r"trainer\.pt"):
        load_checkpoint(tmp_path, model, optimizer)


def test_a_checkpoint_of_another_model_is_refused(policy_directory, chat_directory, tmp_path):
    model, optimizer = fresh(chat_directory)
    path = save_checkpoint(tmp_path, model, optimizer, Progress(1, 1))
    with pytest.raises(CheckpointError, match="does not fit"):
        load_checkpoint(path, *fresh(policy_directory))
    shutil.rmtree(path / "policy")
    with pytest.raises(CheckpointError, match="does not fit"):
        load_checkpoint(path, *fresh(policy_directory))


def test_a_checkpoint_of_another_optimizer_is_refused(policy_directory, tmp_path, factories):
    path = save_checkpoint(tmp_path, *fresh(policy_directory), Progress(1, 1))
    with pytest.raises(CheckpointError, match=r"with AdamW, and optimizer\.name makes SGD"):
        load_checkpoint(path, *fresh(policy_directory, f"{factories}:momentum"))


def test_an_optimizers_state_that_cannot_be_read_again_is_refused(
    policy_directory, tmp_path, factories
):
    name = f"{factories}:Opaque"
    path = save_checkpoint(tmp_path, *fresh(policy_directory, name), Progress(1, 1))
    with pytest.raises(CheckpointError, match="add_safe_globals"):
        load_checkpoint(path, *fresh(policy_directory, name))
