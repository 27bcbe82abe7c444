"""A second device on a machine that has none: PyTorch's ``privateuseone``, computed on the CPU.

It is as strict as a GPU: an operation that is given tensors of both devices fails, and NumPy does
not see its memory. What it cannot show: kernels that only a real one lacks, bfloat16, and
recomputed layers.

Run as a program, since a process that knows the device takes it for its accelerator from then on:
trains the same on either device, and prints how far the weights are apart in the end.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.reconstruct.samples.sample import Conservation, Episode, Sample
from bridle.store.records import CallKind, SessionRecord
from bridle.store.reward import Reward, RewardSource
from bridle.trainer.config import (
    ComputeConfig,
    GrpoConfig,
    LoraConfig,
    LossConfig,
    OptimizerConfig,
    PackingConfig,
    SftConfig,
)
from bridle.trainer.learner.learner import Learner
from bridle.trainer.learner.sft_update import SftExample
from bridle.trainer.learner.trained import TrainedPolicy
from bridle.trainer.loop import GrpoLoop
from bridle.trainer.policy.compute import choose_device
from bridle.trainer.policy.model import (
    ON_CPU,
    checkpoint_tensors,
    load_policy,
    score_sequence,
    trainable_policy,
)
from bridle.trainer.sft.sft import train_sft

NAME = "second"
VOCABULARY = 64
CPU = torch.device("cpu")
COPIES = torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default
INDEXED = torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default
"""These take their indices from any device."""


class MixedDevices(RuntimeError):
    """An operation was given tensors of both devices."""


class Elsewhere(torch.Tensor):
    """A tensor of the second device; ``here`` holds its numbers."""

    here: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, here: torch.Tensor) -> Elsewhere:
        made: Elsewhere = torch.Tensor._make_wrapper_subclass(
            cls,
            here.size(),
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=torch.device(NAME, 0),
        )
        made.here = here
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.here.__reduce_ex__(protocol)

    def tolist(self) -> Any:
        return self.here.tolist()

    def storage(self) -> Any:
        return self.here.storage()

    def untyped_storage(self) -> Any:
        return self.here.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


class SecondDevice(TorchDispatchMode):
    """While it lasts, tensors can be brought to the device and made on it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = args[:1] if func in INDEXED else args
    tensors = [each for each in tree_leaves((given, kwargs)) if isinstance(each, torch.Tensor)]
    there = [each for each in tensors if isinstance(each, Elsewhere)]
    asked = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    if (
        func not in COPIES
        and there
        and any(each.dim() and not isinstance(each, Elsewhere) for each in tensors)
    ):
        raise MixedDevices(f"{func} of tensors of both devices")
    if func is COPIES[0]:
        onto = isinstance(args[0], Elsewhere)
    else:
        onto = bool(there) if asked is None else asked.type == NAME
    if asked is not None and asked.type == NAME:
        kwargs = kwargs | {"device": CPU}
    inside_args, inside_kwargs = tree_map(
        lambda each: each.here if isinstance(each, Elsewhere) else each, (args, kwargs)
    )
    found = func(*inside_args, **inside_kwargs)
    if not onto:
        return found
    found = tree_map(
        lambda each: Elsewhere(each) if isinstance(each, torch.Tensor) else each, found
    )
    return return_and_correct_aliasing(func, args, kwargs, found) if there else found


def episode(generator: np.random.Generator, group: str, number: int) -> Episode:
    """A session of random tokens, of which all but the first four were sampled."""
    ids = np.concatenate([[5, 9, 12, 30], generator.integers(0, VOCABULARY, 12)]).astype(np.uint32)
    mask = np.arange(16) >= 4
    session = f"{group}-{number}"
    sample = Sample(
        session_id=session,
        leaf_call_id=session,
        kind=CallKind.MAIN,
        role=None,
        token_ids=ids,
        mask=mask,
        logprobs=np.where(mask, -4.2, 0.0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int64),
        calls=np.where(mask, 0, -1).astype(np.int32),
        call_ids=(session,),
        weight=1.0,
    )
    return Episode(
        session=SessionRecord(id=session, created_at=0.0, group_id=group, outcome="completed"),
        samples=(sample,),
        rewards=(Reward(session, "score", float(number % 2), 0.0, source=RewardSource.VERIFIER),),
        conservation=Conservation(captured=12, trained=12, masked={}, dropped={}),
    )


def collect(step: int, version: int) -> Sequence[Episode]:
    generator = np.random.default_rng(step)
    return [episode(generator, f"{step}-{group}", n) for group in range(2) for n in range(4)]


def trained(policy: Path, out: Path, compute: ComputeConfig) -> dict[str, Any]:
    """The weights on the CPU after GRPO, stopped and resumed, and after SFT of adapters."""
    config = GrpoConfig(
        steps=3,
        minibatches=2,
        epochs=2,
        max_staleness=0,
        optimizer=OptimizerConfig(learning_rate=1e-3),
        compute=compute,
        packing=PackingConfig(max_tokens=64, block_tokens=16),
        loss=LossConfig(name="gspo", kl_coefficient=0.1),
    )
    reference = load_policy(policy, compute=compute).requires_grad_(False)
    for steps in (2, 3):
        model = load_policy(policy, compute=compute)
        learner = Learner(model, config, reference)
        loop = GrpoLoop(replace(config, steps=steps), [TrainedPolicy(learner, out)], collect)
        if steps == 3:
            loop.resume()
        loop.run()
    tuned = trainable_policy(policy, compute, LoraConfig(rank=2))
    ids = np.arange(5, 30)
    sft = SftConfig(epochs=2, packing=PackingConfig(layout="padded"), compute=compute)
    train_sft(Learner(tuned, sft), [SftExample(ids, ids > 9)], sft)
    scores = score_sequence(tuned, ids).detach()
    tensors = {f"grpo {name}": each for name, each in checkpoint_tensors(model).items()}
    tensors |= {f"sft {name}": each for name, each in checkpoint_tensors(tuned).items()}
    assert {each.device.type for each in tensors.values()} == {scores.device.type}
    return {name: each.cpu() for name, each in (tensors | {"scores": scores}).items()}


def largest_gap(tensors: dict[str, Any], others: dict[str, Any]) -> float:
    both = tensors.keys() & others.keys()
    return max(float((tensors[name] - others[name]).abs().max()) for name in both)


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    # Before the first backward pass, which counts the devices.
    _setup_privateuseone_for_python_backend(NAME)
    policy = directory / "policy"
    shape = TinyShape(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48, context=512)
    make_policy(policy, shape, vocab_size=VOCABULARY, seed=1)
    plain = trained(policy, directory / "cpu", ON_CPU)
    before = load_policy(policy).state_dict()
    torch.__future__.set_swap_module_params_on_conversion(True)
    with SecondDevice():
        compute = ComputeConfig(precision="float32")
        there = trained(policy, directory / NAME, compute)
        device = str(choose_device("auto"))
        try:
            torch.ones(2, device=device) + torch.ones(2)
            mixed = True
        except MixedDevices:
            mixed = False
    apart = largest_gap(plain, there)
    moved = largest_gap({f"grpo {name}": each for name, each in before.items()}, plain)
    print(json.dumps({"device": device, "mixed": mixed, "moved": moved, "apart": apart}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
