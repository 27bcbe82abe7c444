"""A policy that two processes train together: the same numbers as one, and no process left over."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import threading
import time

import numpy as np
import pytest
import torch
from transformers import AutoConfig, Lfm2Config, Lfm2ForCausalLM

from bridle.trainer.config import (
    ComputeConfig,
    GrpoConfig,
    LoraConfig,
    LossConfig,
    OptimizerConfig,
    PackingConfig,
    SftConfig,
)
from bridle.trainer.learner.checkpoint import CheckpointError, checkpoints
from bridle.trainer.learner.group import LearnerFailed, LearnerGroup, learning
from bridle.trainer.loop import GrpoLoop
from bridle.trainer.policy.compute import UnsupportedCompute
from bridle.trainer.policy.durable import NotWritten
from bridle.trainer.policy.model import UnsupportedModel, load_policy
from bridle.trainer.publish.publisher import default_probes
from bridle.trainer.sft.data import SftExample
from bridle.trainer.sft.sft import train_sft

BOTH = "cpu,cpu"
CONFIG = GrpoConfig(
    steps=3,
    minibatches=2,
    epochs=2,
    optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=0.1),
    packing=PackingConfig(max_tokens=64, block_tokens=16),
)
VARIANTS = {
    "plain": {},
    "penalty": {
        "loss": LossConfig(name="gspo", kl_coefficient=0.1),
        "compute": ComputeConfig(recompute=True),
    },
    "adapters": {
        "lora": LoraConfig(rank=2),
        "packing": PackingConfig(layout="padded", max_tokens=64),
    },
}


@pytest.fixture
def collect(make_sample, make_episode):
    """Sessions of which the packs of a minibatch are an odd number, so that a turn is idle."""

    def run(step, version):
        random = np.random.default_rng(step)
        return [
            make_episode(
                [
                    make_sample(
                        random.integers(0, 64, 30).tolist(),
                        range(18, 30),
                        session=f"{group}-{number}",
                        version=version,
                        logprobs=random.uniform(-6, -2, 12).tolist(),
                    )
                ],
                float(number % 2),
                session=f"{group}-{number}",
                group=f"{step}-{group}",
            )
            for group in range(2)
            for number in range(5)
        ]

    return run


def on(device, config):
    return dataclasses.replace(config, compute=dataclasses.replace(config.compute, device=device))


def trained(policy, config, collect, directory, *, steps=3, resume=False):
    """The reports of a run, and the weights that it ends with."""
    reports = []
    with learning(policy, config) as learner:
        config = dataclasses.replace(config, steps=steps)
        loop = GrpoLoop(config, learner, collect, directory=directory)
        if resume:
            loop.resume()
        loop.run(reports.append)
        learner.save(directory / "saved")
    assert AutoConfig.from_pretrained(directory / "saved").architectures == ["Qwen3ForCausalLM"]
    return reports, load_policy(directory / "saved").state_dict()


def apart(state, other):
    assert state.keys() == other.keys()
    return max(float((state[name] - other[name]).abs().max()) for name in state)


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_processes_train_the_same_weights_as_one(variant, policy_directory, collect, tmp_path):
    config = dataclasses.replace(CONFIG, **VARIANTS[variant])
    alone, expected = trained(policy_directory, on("cpu", config), collect, tmp_path / "one")
    together, found = trained(policy_directory, on(BOTH, config), collect, tmp_path / "two")
    moved = apart(load_policy(policy_directory).state_dict(), expected)
    assert moved > 1e-3
    assert [report.version for report in together] == [1, 2, 3]
    assert apart(expected, found) < 2e-6
    for one, two in zip(alone, together, strict=True):
        ours, theirs = one.metrics(), two.metrics()
        assert ours.keys() == theirs.keys()
        for name in ours:
            if not name.startswith("seconds/"):
                assert theirs[name] == pytest.approx(ours[name], rel=2e-3, abs=2e-6), name


@pytest.mark.parametrize(
    ("devices", "rank"), [(("cpu", BOTH), 0), (("cpu", BOTH), 2), ((BOTH, "cpu"), 0)]
)
def test_a_run_goes_on_with_another_number_of_processes(
    devices, rank, policy_directory, collect, tmp_path
):
    config = dataclasses.replace(CONFIG, lora=LoraConfig(rank=rank))
    _, expected = trained(policy_directory, on("cpu", config), collect, tmp_path / "whole")
    first, then = devices
    trained(policy_directory, on(first, config), collect, tmp_path / "cut", steps=2)
    reports, found = trained(
        policy_directory, on(then, config), collect, tmp_path / "cut", resume=True
    )
    assert [report.step for report in reports] == [2]
    assert apart(expected, found) < 2e-6


def test_fine_tuning_by_two_processes_is_that_of_one(policy_directory, tmp_path):
    ids = np.arange(40, dtype=np.uint32)
    examples = [SftExample((ids[: 20 + n] * n) % 64, ids[: 20 + n] > 9) for n in range(1, 8)]
    results = []
    for device in ("cpu", BOTH):
        config = on(device, SftConfig(epochs=2, batch_size=3, packing=PackingConfig(max_tokens=64)))
        with learning(policy_directory, config) as learner:
            history = train_sft(learner, examples, config)
            learner.save(tmp_path / device)
        results.append((history, load_policy(tmp_path / device).state_dict()))
    (alone, expected), (together, found) = results
    assert [each.loss for each in together] == pytest.approx([each.loss for each in alone])
    assert apart(expected, found) < 2e-6


@pytest.fixture(scope="module")
def group(policy_directory):
    """For tests that leave it as it was."""
    with LearnerGroup(policy_directory, CONFIG, [torch.device("cpu")] * 2) as group:
        yield group


@pytest.fixture
def group_to_end(policy_directory):
    with LearnerGroup(policy_directory, CONFIG, [torch.device("cpu")] * 2) as group:
        yield group


def lives(process):
    return process.is_alive() and os.path.exists(f"/proc/{process.pid}")


def test_a_group_says_what_one_process_says(group, policy_directory):
    probes = default_probes(64)
    with learning(policy_directory, CONFIG) as alone:
        assert (group.vocabulary, group.packing) == (alone.vocabulary, alone.packing)
        assert group.is_rounded == alone.is_rounded
        for ours, theirs in zip(alone.scores(probes), group.scores(probes), strict=True):
            np.testing.assert_allclose(theirs, ours, atol=1e-5)


def test_a_process_that_is_killed_ends_the_others_and_is_told_of(group_to_end):
    victim, other = group_to_end._processes
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(LearnerFailed, match="trains on cpu ended by signal 9"):
        group_to_end.scores(default_probes(64))
    assert not lives(victim)
    assert not lives(other)
    with pytest.raises(LearnerFailed, match="trains on cpu ended by signal 9"):
        group_to_end.scores(default_probes(64))


def test_an_error_is_raised_as_it_was_and_the_group_goes_on(group, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        group.load_checkpoint(tmp_path)
    with pytest.raises((NotWritten, OSError)):
        group.save(tmp_path / "file" / "below")
    assert len(group.scores(default_probes(64))) == 2


def test_a_policy_that_cannot_be_trained_leaves_no_process(tmp_path):
    group = LearnerGroup(tmp_path, CONFIG, [torch.device("cpu")] * 2)
    with pytest.raises(UnsupportedModel, match=r"config\.json"), group:
        pass
    assert not any(lives(process) for process in group._processes)


def test_what_was_interrupted_is_finished_and_not_taken_for_the_next_answer(group):
    """Ctrl-C while the processes compute: they do not hear of it."""
    before = group.scores(default_probes(64))
    longer = [np.arange(64)] * 400
    pids = [process.pid for process in group._processes]

    def interrupt():
        time.sleep(0.2)
        for pid in (*pids, os.getpid()):
            os.kill(pid, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        group.scores(longer)
    for ours, theirs in zip(before, group.scores(default_probes(64)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_nobody_waits_for_one_that_was_not_told(group_to_end, monkeypatch):
    def interrupted(_message):
        raise KeyboardInterrupt

    monkeypatch.setattr(group_to_end._pipes[1], "send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        group_to_end.scores(default_probes(64))
    assert not any(lives(process) for process in group_to_end._processes)
    with pytest.raises(LearnerFailed, match="not all were told"):
        group_to_end.scores(default_probes(64))


def test_interrupted_steps_are_not_in_a_checkpoint(policy_directory, collect, tmp_path):
    with learning(policy_directory, on(BOTH, CONFIG)) as learner:
        real = learner.update

        def update(*arguments, step, **named):
            stats = real(*arguments, step=step, **named)
            if step == 1:
                raise KeyboardInterrupt
            return stats

        learner.update = update
        loop = GrpoLoop(CONFIG, learner, collect, directory=tmp_path)
        with pytest.raises(KeyboardInterrupt):
            loop.run()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000001"]


def test_a_warning_is_given_once(tmp_path, capfd, monkeypatch):
    # Forked processes write to the streams that the forkserver started with, not to ``capfd``.
    spawning = multiprocessing.get_context("spawn")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _method: spawning)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4}
    layers = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    torch.manual_seed(3)
    config = Lfm2Config(**sizes, **layers, num_key_value_heads=2, initializer_range=0.3)
    Lfm2ForCausalLM(config).save_pretrained(tmp_path)
    with learning(tmp_path, on(BOTH, CONFIG)) as learner:
        assert learner.packing.layout == "padded"
    said = capfd.readouterr().err
    assert said.count("is trained in padded rows") == 1
    assert "FSDP" not in said


@pytest.mark.parametrize("device", ["cpu", BOTH])
def test_memory_that_does_not_suffice_is_told_of_with_what_needs_less(policy_directory, device):
    said = "CUDA out of memory. Tried to allocate 2 GiB.\nMore about it"
    with (
        pytest.raises(UnsupportedCompute, match=r"Tried to allocate 2 GiB\. Less .*--lora-rank"),
        learning(policy_directory, on(device, CONFIG)),
    ):
        raise torch.OutOfMemoryError(said)


def test_processes_end_with_the_one_that_tells_them(group_to_end):
    for pipe in group_to_end._pipes:
        pipe.close()  # as the kernel does when this process is killed
    for process in group_to_end._processes:
        process.join(10)
    assert not any(lives(process) for process in group_to_end._processes)
