"""LoRA (Hu et al. 2021, arXiv 2106.09685): training small adapters on a frozen policy.

The adapters are PEFT's. The ``policy/`` of a checkpoint has the adapters merged in, and so have
published weights: they are a model like any other, which every engine serves. Published by
themselves, the adapters are a directory as PEFT writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer, ParamWrapper
from safetensors.torch import save_file
from torch import Tensor, nn

from bridle.trainer.config import LoraConfig
from bridle.trainer.policy.compute import UnsupportedCompute
from bridle.trainer.policy.sharding import gathered, own_part, share_of

WEIGHTS_FILE: Final = "adapter_model.safetensors"
_NAME: Final = "default"


def add_adapters(model: nn.Module, config: LoraConfig, seed: int) -> None:
    """Give every linear layer but the output head an adapter, in float32, and freeze the rest.

    New adapters change nothing yet. ``seed`` decides their initial weights. Raises ``ValueError``
    for layers that PEFT cannot give any (Mamba).
    """
    chosen = PeftConfig(r=config.rank, lora_alpha=config.alpha, target_modules="all-linear")
    # PEFT draws them on the CPU, and then brings them to the device.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        inject_adapter_in_model(chosen, model, _NAME)
    model.eval()
    for adapter in adapters(model).values():
        adapter.data = adapter.data.float()


def adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the adapter parameters of a model by name; empty if it has no adapters."""
    return {name: each for name, each in model.named_parameters() if ".lora_" in name}


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Let ``model`` compute as the policy below its adapters.

    A model without adapters is unchanged.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    trained = adapters(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    # PEFT freezes what it switches off. FSDP2 asks in the first pass what is trained.
    for adapter in trained:
        adapter.requires_grad_(True)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def scaling(model: nn.Module) -> float | None:
    """Return the factor of the adapters' output, or ``None`` without any."""
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            return float(layer.scaling[_NAME])
    return None


def load_adapters(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load ``tensors`` into the adapters of ``model``.

    Raises ``ValueError`` if they are not its own.
    """
    own = adapters(model)
    if {name: each.shape for name, each in own.items()} != {
        name: each.shape for name, each in tensors.items()
    }:
        raise ValueError("it has other adapters")
    with torch.no_grad():
        for name, adapter in own.items():
            adapter.copy_(own_part(tensors[name], adapter))


def save_adapters(model: nn.Module, directory: Path, base: Path) -> None:
    """Write the adapters of ``model`` alone to ``directory``, as a PEFT adapter of ``base``.

    If the model is spread, the first process writes. Raise :class:`UnsupportedCompute` for a model
    without adapters, and for adapters on stacked experts, which engines do not load.
    """
    layers = {name: each for name, each in model.named_modules() if isinstance(each, LoraLayer)}
    if not layers:
        raise UnsupportedCompute("there are no adapters to publish: set training.lora.rank")
    if any(isinstance(layer, ParamWrapper) for layer in layers.values()):
        raise UnsupportedCompute(
            "the policy has adapters on experts that are one tensor, which engines do not load as "
            "adapters: publish merged weights with training.publish.through=directory"
        )
    tensors = gathered(model, adapters(model))
    if not share_of(model).is_first:
        return
    layer = next(iter(layers.values()))
    PeftConfig(
        r=layer.r[_NAME],
        lora_alpha=layer.lora_alpha[_NAME],
        target_modules={name.rpartition(".")[2] for name in layers},
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(base),
        inference_mode=True,
    ).save_pretrained(str(directory))
    save_file(
        {
            f"base_model.model.{name.replace(f'.{_NAME}.', '.')}": each.detach().cpu().contiguous()
            for name, each in tensors.items()
        },
        directory / WEIGHTS_FILE,
    )


@torch.no_grad()
def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of ``model`` with its adapters merged in.

    Its names are those that the model has without adapters. Weights without an adapter are the
    model's own, not copies.
    """
    state = {
        _name_without(name): each
        for name, each in model.state_dict().items()
        if ".lora_" not in name
    }
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            # PEFT adapts the stacked weights of experts one by one, each around the one before.
            parameter = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
            whole = _name_without(f"{name}.{parameter}")
            change = layer.get_delta_weight(_NAME)
            state[whole] = (state[whole].float() + change).to(state[whole].dtype)
    return state


def _name_without(name: str) -> str:
    """Return the name that a weight below adapters has without them."""
    return name.replace("base_layer.", "")
