"""A policy that several ranks train together: the same weights as one process, and no rank left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bridle.cli.ranks import run_on_each_device
from bridle.run.environment import without_rank
from bridle.trainer.config import GrpoConfig
from bridle.trainer.learner.learner import Learner
from bridle.trainer.learner.ranks import learning
from bridle.trainer.learner.world import World
from bridle.trainer.policy.compute import UnsupportedCompute
from bridle.trainer.policy.lora import WEIGHTS_FILE
from bridle.trainer.policy.model import load_policy
from support.processes import free_port

PROGRAM = Path(__file__).with_name("ranks_program.py")
TOGETHER = ("plain", "penalty", "lora", "matrices", "matrices_again")
TOGETHER += ("fine_tuned", "operations")
TIMEOUT_S = 240


@pytest.fixture(scope="module")
def alone(policy_directory, tmp_path_factory):
    """Each variant in one process."""
    out = tmp_path_factory.mktemp("alone")
    run([PROGRAM, policy_directory, out, *TOGETHER])
    return out


@pytest.fixture(scope="module")
def together(policy_directory, tmp_path_factory):
    """Each variant in two processes on each of two nodes."""
    out = tmp_path_factory.mktemp("together")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    torchrun += ["--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    torchrun += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"]
    command = [*torchrun, PROGRAM, policy_directory, out, *TOGETHER]
    nodes = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(2)]
    for node in nodes:
        assert node.wait(TIMEOUT_S) == 0, node.stderr.read().decode()
    return out


def run(command):
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


def found(out, variant):
    """Return a variant's report, and the weights that it ended with."""
    report = json.loads((out / f"{variant}.json").read_text())
    return report, load_policy(out / variant / "weights").state_dict()


def largest_difference(state, other):
    assert state.keys() == other.keys()
    return max(float((state[name] - other[name]).abs().max()) for name in state)


@pytest.mark.distributed
@pytest.mark.parametrize("variant", ["plain", "penalty", "lora"])
def test_two_nodes_of_two_processes_train_the_same_weights_as_one(
    variant, alone, together, policy_directory
):
    ours, expected = found(alone, variant)
    theirs, weights = found(together, variant)
    start = load_policy(policy_directory).state_dict()
    assert largest_difference(start, expected) > 1e-4
    assert largest_difference(expected, weights) < 2e-6
    assert len(ours["steps"]) == len(theirs["steps"]) == 3
    for one, several in zip(ours["steps"], theirs["steps"], strict=True):
        assert one.keys() == several.keys()
        for name in one:
            if not name.startswith("seconds/"):
                assert several[name] == pytest.approx(one[name], rel=2e-3, abs=2e-6), name


@pytest.mark.distributed
def test_several_processes_write_the_adapters_of_one(alone, together):
    expected, written = (
        load_file(out / "lora" / "adapters" / WEIGHTS_FILE) for out in (alone, together)
    )
    assert largest_difference(expected, written) < 2e-6
    assert max(float(each.abs().max()) for name, each in written.items() if "lora_B" in name) > 1e-3
    ours, theirs = (
        json.loads((out / "lora" / "adapters" / "adapter_config.json").read_text())
        for out in (alone, together)
    )
    assert set(theirs.pop("target_modules")) == set(ours.pop("target_modules"))
    assert theirs == ours


@pytest.mark.distributed
def test_muon_and_adamw_train_the_same_weights_in_several_processes(
    alone, together, policy_directory
):
    """Muon computes its updates in bfloat16, whose products round by what they are summed over."""
    ours, expected = found(alone, "matrices")
    _, weights = found(together, "matrices")
    start = load_policy(policy_directory).state_dict()
    moved = largest_difference(start, expected)
    assert moved > 1e-3
    assert largest_difference(expected, weights) < 0.05 * moved
    assert len(ours["steps"]) == 2
    for out in (alone, together):
        again = json.loads((out / "matrices_again.json").read_text())
        assert len(again["steps"]) == 1, "the others came before the checkpoint"


@pytest.mark.distributed
def test_several_ranks_fine_tune_as_one(alone, together):
    ours, expected = found(alone, "fine_tuned")
    theirs, weights = found(together, "fine_tuned")
    assert theirs["losses"] == pytest.approx(ours["losses"])
    assert largest_difference(expected, weights) < 2e-6


@pytest.mark.distributed
def test_rank_0_sees_errors_and_interrupts_as_one_process_does(alone, together):
    ours, _ = found(alone, "operations")
    theirs, _ = found(together, "operations")
    assert "is not a checkpoint" in theirs["no_checkpoint"]
    assert "set training.lora.rank" in theirs["no_adapters"]
    assert theirs["no_adapters"] == ours["no_adapters"]
    assert theirs["not_written"] == ours["not_written"]
    assert theirs["interrupted"] is theirs["same_after"] is True
    assert theirs["scores"] == [pytest.approx(each, abs=1e-5) for each in ours["scores"]]
    assert "published through directories" in theirs["tensors"]


@pytest.mark.distributed
def test_a_rank_that_is_killed_costs_no_step(alone, policy_directory, tmp_path):
    run([PROGRAM, "--launch", policy_directory, tmp_path, "killed"])
    report, weights = found(tmp_path, "killed")
    _, expected = found(alone, "plain")
    assert 1 <= len(report["steps"]) <= 2, "steps before the checkpoint are not trained again"
    assert largest_difference(expected, weights) < 2e-6


def test_a_rank_has_the_device_of_its_place():
    assert World(1, 2, 1, 2).device("cpu").type == "cpu"
    with pytest.raises(UnsupportedCompute, match="lower --nproc-per-node"):
        World(2, 3, 2, 3).device("cpu,cpu")


def test_one_device_is_trained_on_in_this_process(policy_directory):
    run_on_each_device("cpu")
    with learning(policy_directory, GrpoConfig()) as learner:
        assert isinstance(learner, Learner)


def test_memory_that_does_not_suffice_is_reported_with_what_needs_less(policy_directory):
    message = "CUDA out of memory. Tried to allocate 2 GiB.\nMore about it"
    with (
        pytest.raises(UnsupportedCompute, match=r"Tried to allocate 2 GiB\. Less .*lora\.rank"),
        learning(policy_directory, GrpoConfig()),
    ):
        raise torch.OutOfMemoryError(message)


def test_services_of_rank_0_are_not_ranks():
    own = {"PATH": os.defpath, "LOCALE": "C"}
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
    assert without_rank({**own, **ranks}) == own
