"""The device that a policy is trained on, and the precision of its forward passes.

Mixed precision is PyTorch's autocast: weights, gradients and the optimizer's state stay in float32,
where the small updates of reinforcement learning are not rounded away, and what a forward pass
multiplies is rounded to bfloat16 on the way, as an engine on a GPU has it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from trainer.config import ComputeConfig

_AUTOCAST: Final = "bridle_autocast"
"""Attribute of a placed model: the type that its forward passes compute in."""


class UnsupportedCompute(ValueError):
    """This machine, or this build of PyTorch, has no device of that name; or the model cannot be
    computed as told."""


def choose_device(name: str) -> torch.device:
    """``auto``, or PyTorch's name of a device.

    Raises :class:`UnsupportedCompute` when it is not here.
    """
    if name == "auto":
        if not torch.accelerator.is_available():
            return torch.device("cpu")
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UnsupportedCompute(f"no device {name!r}: {str(error).splitlines()[0]}") from error


def place(model: nn.Module, compute: ComputeConfig) -> nn.Module:
    """``model`` on its device, computing as told, in evaluation mode (no dropout).

    Raises :class:`UnsupportedCompute`.
    """
    device = choose_device(compute.device)
    if device.type == "cuda" and device.index is not None:
        # What asks for the present device, as NCCL's end of a weight transfer does, means this one.
        torch.cuda.set_device(device)
    placed = model.to(device).eval()
    if in_bfloat16(device, compute):
        setattr(placed, _AUTOCAST, torch.bfloat16)
    if compute.recompute:
        _recompute_layers(placed)
    return placed


def computing(model: nn.Module) -> AbstractContextManager[Any]:
    """The context that a forward pass of ``model`` belongs in."""
    dtype = getattr(model, _AUTOCAST, None)
    if dtype is None:
        return nullcontext()
    return torch.autocast(next(model.parameters()).device.type, dtype)


def is_rounded(model: nn.Module) -> bool:
    """Whether ``model`` computes in 16 bits."""
    stored: torch.dtype = next(model.parameters()).dtype
    return torch.bfloat16 in (stored, getattr(model, _AUTOCAST, None))


def in_bfloat16(device: torch.device, compute: ComputeConfig) -> bool:
    """Whether forward passes on ``device`` are to compute in it."""
    if compute.precision == "auto":
        return device.type != "cpu"
    return compute.precision == "bfloat16"


def _recompute_layers(model: nn.Module) -> None:
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        name = type(model).__name__
        raise UnsupportedCompute(f"{name} has no layers that can be computed again")
    for layer in layers:
        # Transformers' own switch recomputes in training mode only, in which layers also drop out.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
