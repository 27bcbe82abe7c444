"""The devices that a policy is trained on, and the precision of its forward passes.

Mixed precision is PyTorch's autocast. Weights, gradients and the optimizer's state stay in float32,
where the small updates of reinforcement learning are not rounded away. Factors in a forward pass
are rounded to bfloat16 on the way, as in an engine on a GPU.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from bridle.errors import BridleError
from bridle.trainer.config import ComputeConfig
from bridle.trainer.policy.sharding import shard

_RANGE: Final = re.compile(r"(\w+):(\d+)-(\d+)")
_AUTOCAST: Final = "bridle_autocast"
"""Attribute of a placed model: the type that its forward passes compute in."""


class UnsupportedCompute(BridleError, ValueError):
    """The device does not exist here, or the model cannot be computed as configured.

    A device does not exist if this machine, or this build of PyTorch, has none of that name.
    """


def choose_device(name: str) -> torch.device:
    """Return the device called ``name``: ``auto``, or PyTorch's name of a device.

    Raises :class:`UnsupportedCompute` if it is not here.
    """
    if name == "auto":
        if not torch.accelerator.is_available():
            return torch.device("cpu")
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    try:
        device = torch.device(name)
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None or accelerator.type != device.type:
            return torch.empty(0, device=device).device
        # Asked without a tensor there, which takes some of its memory for as long as we live.
        index, count = device.index or 0, torch.accelerator.device_count()
        if index >= count:
            raise UnsupportedCompute(f"no device {name!r}: there are {count} here")
        return torch.device(device.type, index)
    except (RuntimeError, AssertionError) as error:
        raise UnsupportedCompute(f"no device {name!r}: {str(error).splitlines()[0]}") from error


def choose_devices(names: str) -> list[torch.device]:
    """Return the devices that a :attr:`ComputeConfig.device` names: one, or several of one kind.

    Raises :class:`UnsupportedCompute`.
    """
    devices = [choose_device(name) for each in names.split(",") for name in _named(each.strip())]
    if len({device.type for device in devices}) > 1:
        raise UnsupportedCompute(f"a policy is not spread over different kinds of device: {names}")
    if devices[0].type != "cpu" and len(set(devices)) < len(devices):
        raise UnsupportedCompute(f"{names} names a device twice")
    return devices


def _named(name: str) -> list[str]:
    """Return the single names of a range: ``cuda:0-3`` is four of them."""
    found = _RANGE.fullmatch(name)
    if found is None:
        return [name]
    first, last = int(found[2]), int(found[3])
    if first > last:
        raise UnsupportedCompute(f"{name} is no range of devices")
    return [f"{found[1]}:{index}" for index in range(first, last + 1)]


def place(model: nn.Module, compute: ComputeConfig, mesh: DeviceMesh | None = None) -> nn.Module:
    """Place ``model`` on its device, computing as configured, in evaluation mode (no dropout).

    With a ``mesh`` it is spread over the processes of it, of which this is one. Raises
    :class:`UnsupportedCompute`.
    """
    device = choose_device(compute.device)
    if device.type == "cuda" and device.index is not None:
        # What asks for the present device, as NCCL's end of a weight transfer does, means this one.
        torch.cuda.set_device(device)
    placed = (model if mesh else model.to(device)).eval()
    if in_bfloat16(device, compute):
        setattr(placed, _AUTOCAST, torch.bfloat16)
    if compute.recompute:
        _recompute_layers(placed)
    if mesh:
        shard(placed, _layers(placed), mesh)
    return placed


def computing(model: nn.Module) -> AbstractContextManager[Any]:
    """Return the context in which a forward pass of ``model`` must run."""
    dtype = getattr(model, _AUTOCAST, None)
    if dtype is None:
        return nullcontext()
    return torch.autocast(next(model.parameters()).device.type, dtype)


def computed_dtype(model: nn.Module) -> torch.dtype:
    """Return the type that forward passes of ``model`` multiply in."""
    stored: torch.dtype = next(model.parameters()).dtype
    return getattr(model, _AUTOCAST, None) or stored


def is_rounded(model: nn.Module) -> bool:
    return computed_dtype(model) is torch.bfloat16


def in_bfloat16(device: torch.device, compute: ComputeConfig) -> bool:
    """Return whether forward passes on ``device`` are to compute in bfloat16."""
    if compute.precision == "auto":
        return device.type != "cpu"
    return compute.precision == "bfloat16"


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that Transformers computes one after another."""
    return [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]


def _recompute_layers(model: nn.Module) -> None:
    layers = _layers(model)
    if not layers:
        name = type(model).__name__
        raise UnsupportedCompute(f"{name} has no layers that can be computed again")
    for layer in layers:
        # Transformers' own switch recomputes in training mode only, in which layers also drop out.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
