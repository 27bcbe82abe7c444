"""A policy spread over several devices, each with a process of its own: PyTorch's FSDP2.

Every process holds a part of each weight, of its gradient and of its optimizer's state, brings a
layer together for as long as the layer computes, and computes packs of its own; gradients are
summed over the processes. All processes therefore run the same forward and backward passes in the
same order: one that has no pack left computes a token that counts for nothing.

A model that is not spread is handled as one with one process, at no cost.

Zhao et al. 2023, "PyTorch FSDP", arXiv 2304.11277.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

Part = TypeVar("Part")
Result = TypeVar("Result")

_SHARE: Final = "bridle_share"
_FORWARD: Final = "bridle_forward"


@dataclass(frozen=True, slots=True)
class Share:
    """The place of this process among several."""

    rank: int = 0
    processes: int = 1

    @property
    def is_first(self) -> bool:
        """Return whether this process writes files and acts for all."""
        return self.rank == 0

    def of(self, parts: Sequence[Part], size: Callable[[Part], int]) -> list[Part | None]:
        """Return this process's ``parts``, one per turn. ``None`` marks a turn without one.

        The parts of one turn are of similar size, because every process waits for the last.
        """
        if self.processes == 1:
            return list(parts)
        by_size = sorted(parts, key=size, reverse=True)
        turns = -(-len(parts) // self.processes)
        mine: list[Part | None] = list(by_size[self.rank :: self.processes])
        return mine + [None] * (turns - len(mine))


def share_of(model: nn.Module) -> Share:
    share: Share = getattr(model, _SHARE, Share())
    return share


def shard(model: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Spread ``model`` over the processes of ``mesh``, with ``layers`` brought together one by one.

    ``model`` must be whole and on the CPU. No process waits for another, so they may do this in
    turn.
    """
    for module in (*layers, model):
        # The model itself would otherwise stay together after a pass: its parameters are then not
        # those that an optimizer trains.
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
        assert isinstance(module, FSDPModule)  # noqa: S101 - fully_shard makes it one
        # A loss is a sum over all packs, whoever computes them, so gradients are not averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    setattr(model, _SHARE, Share(mesh.get_rank(), mesh.size()))
    setattr(model, _FORWARD, MethodType(_forward, model))
    register_fsdp_forward_method(model, _FORWARD)


def _forward(_model: nn.Module, function: Callable[..., Result], *arguments: Any) -> Result:
    return function(*arguments)


def within_forward(model: nn.Module, function: Callable[..., Result], *arguments: Any) -> Result:
    """Run ``function(*arguments)``, which computes with ``model``'s parts, as a forward pass of it.

    Gradients flow through returned tensors that stand by themselves, in a tuple or in a list.
    """
    forward = getattr(model, _FORWARD, None)
    if forward is None:
        return function(*arguments)
    result: Result = forward(function, *arguments)
    return result


def gathered(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``tensors``, by the names that ``model`` has for them, each brought together.

    If the model is spread, they are on the CPU of the first process, and the other processes get
    none. Tied weights stay one tensor.
    """
    share = share_of(model)
    if share.processes == 1:
        return dict(tensors)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found: dict[int, Tensor | None] = {}
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        itself = id(parameters.get(name, tensor))
        if itself not in found:
            together = _together(tensor).detach()
            found[itself] = together.cpu() if share.is_first else None
        kept = found[itself]
        if kept is not None:
            whole[name] = kept
    return whole


def gathered_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's state as it would be in one process.

    Its tensors are as in :func:`gathered`.
    """
    state: dict[str, Any] = optimizer.state_dict()
    if share_of(model).processes == 1:
        return state
    return {
        **state,
        "state": {key: gathered(model, each) for key, each in state["state"].items()},
    }


def own_part(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this process's part of ``tensor``, which is to replace ``like``."""
    if not isinstance(like, DTensor):
        return tensor
    there = tensor.to(like.device)
    # Without a source every process cuts its part out of its own copy.
    return distribute_tensor(there, like.device_mesh, like.placements, src_data_rank=None)


def own_state(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return this process's part of the state that :func:`gathered_state` returned."""
    if share_of(model).processes == 1:
        return state
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    return {
        **state,
        "state": {
            index: {
                name: own_part(each, parameters[index]) if each.dim() else each
                for name, each in values.items()
            }
            for index, values in state["state"].items()
        },
    }


def _together(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def number(value: Tensor) -> float:
    """Return the value of a scalar that may be spread."""
    return float(_together(value))


@torch.no_grad()
def load_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put whole tensors into ``model``, by the names of its state.

    Raises ``RuntimeError`` if they are not its own.
    """
    own = model.state_dict()
    parts = {
        name: own_part(each, own[name]) if name in own and own[name].shape == each.shape else each
        for name, each in state.items()
    }
    model.load_state_dict(parts)
