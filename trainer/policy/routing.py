"""Replay of recorded routing: a model with experts computes with those that its engine chose.

The router's weights, which mix the experts, are those of the policy in training, so that gradients
flow through the router. Only which experts are mixed is the engine's. Without that, small
differences of precision choose other experts, and a token's probability is that of another network.

Rollout Routing Replay: Ma et al. 2025, arXiv 2510.11370.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from bridle.engine.embedded.routing import UNKNOWN, Routers
from bridle.errors import BridleError

_LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d+)$")
_ROUTERS: Final = "bridle_routers"
"""Attribute of a model that takes ``routed_experts=``."""


def accept_routing(model: nn.Module) -> None:
    """Let the layers of a model with experts take ``routed_experts=``, which they replay.

    The argument is ``int64[positions, layers, top_k]``. A model without experts is left as it is.
    Raise :class:`bridle.engine.embedded.routing.Unreplayable` if a router does not follow it.
    """
    routers = Routers.of(model)
    if routers is None:
        return
    routers.check()
    for name, layer in model.named_modules():
        place = _LAYER.search(name)
        if place is not None and isinstance(layer, GradientCheckpointingLayer):
            # Within the layer's own function, so that a recomputed layer is routed alike.
            layer.forward = partial(_routed, routers, int(place[1]), layer.forward)
    setattr(model, _ROUTERS, routers)


def _routed(
    routers: Routers,
    layer: int,
    forward: Callable[..., Any],
    *inputs: Any,
    routed_experts: Tensor | None = None,
    **options: Any,
) -> Any:
    if routed_experts is None or layer not in routers.by_layer:
        return forward(*inputs, **options)
    with routers.replayed(layer, routed_experts[:, layer]):
        return forward(*inputs, **options)


class RoutingDiffers(BridleError, ValueError):
    """The recorded experts are not those of a model of this shape."""


def routing_of(
    model: nn.Module, experts: NDArray[np.int16], places: Tensor | None = None, positions: int = 0
) -> dict[str, Tensor]:
    """Return the argument that replays ``experts``, ``int16[N, layers, top_k]``, by its name.

    ``places`` (``int64[N]``) are the positions of these tokens among all ``positions`` that the
    model computes; without it, they are all. Return nothing for a model without experts. Raise
    :class:`RoutingDiffers` for the experts of another model.
    """
    routers: Routers | None = getattr(model, _ROUTERS, None)
    if routers is None:
        return {}
    shape, highest = experts.shape[1:], int(experts.max(initial=UNKNOWN))
    if shape != (routers.layers, routers.top_k) or highest >= routers.experts:
        raise RoutingDiffers(
            f"the recorded routing has {shape[0]} layers with {shape[1]} experts for each token, "
            f"numbered up to {highest}; the policy has {routers.layers} with {routers.top_k} of "
            f"{routers.experts}: it is not the model that the engine served"
        )
    numbers = torch.from_numpy(experts).to(next(model.parameters()).device).long()
    if places is not None:
        all_positions = numbers.new_full((positions, *shape), UNKNOWN)
        numbers = all_positions.index_copy(0, places, numbers)
    return {"routed_experts": numbers}
