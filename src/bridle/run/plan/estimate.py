"""From a workload, a model and a device to engines and trainers, by their roofline.

A device computes no faster than its arithmetic and reads no faster than its memory. What real
engines and trainers reach of that is one number, ``efficiency``, which a recorded run gives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from bridle.errors import UsageError
from bridle.run.plan.device import Device
from bridle.run.plan.model import ModelSize
from bridle.run.plan.workload import Workload

CACHE_SHARE: Final = 0.9
"""Of a device's memory that an engine takes, for weights and key-value cache."""
_FULL_STATE: Final = 16
"""Bytes a parameter: float32 weight, gradient and Adam's two moments."""
_REFERENCE: Final = 4
"""Bytes a parameter: the float32 weight of a KL penalty's reference policy."""


@dataclass(frozen=True, slots=True)
class Engines:
    devices_per_engine: int
    """Over which one copy of the model is spread, for weights and one session's cache to fit."""
    parallel: int
    """Sessions at a time in one engine: what was asked, or what fits its memory."""
    seconds_per_session: float
    """Of one engine at that many sessions a time, at the roofline."""

    def needed(self, workload: Workload, efficiency: float) -> int:
        """Engines for the whole workload."""
        seconds = workload.sessions_per_hour * self.seconds_per_session
        return max(1, math.ceil(seconds / efficiency / 3600))


def engines(workload: Workload, model: ModelSize, device: Device, parallel: float) -> Engines:
    """For ``parallel`` sessions at a time in one engine, whose prefix cache holds their histories.

    Raises :class:`bridle.errors.UsageError` for less than one.
    """
    if parallel < 1:
        raise UsageError("an engine runs at least one session at a time")
    cache = workload.tokens * model.cache_bytes
    spread = max(1, math.ceil((model.weight_bytes + cache) / (CACHE_SHARE * device.memory)))
    room = spread * CACHE_SHARE * device.memory - model.weight_bytes
    at_once = min(parallel, room / cache) if cache else parallel
    flops, bandwidth = device.flops * spread, device.bandwidth * spread
    reading = 2 * model.multiplied * workload.read
    reading += model.attention_flops * workload.read * workload.tokens / 2
    per_token = 2 * model.multiplied + model.attention_flops * workload.context
    moved = model.weight_bytes / at_once + workload.context * model.cache_bytes
    drawing = max(per_token / flops, moved / bandwidth) * workload.turns * workload.sampled
    return Engines(spread, max(1, int(at_once)), reading / flops + drawing)


@dataclass(frozen=True, slots=True)
class Trainers:
    state_bytes: float
    """Weights, gradients, the optimizer's moments and a reference; activations come on top."""
    devices_for_state: int
    seconds_per_session: float
    """Of one device, at its arithmetic."""

    def needed(self, workload: Workload, efficiency: float) -> int:
        """Devices for the whole workload."""
        seconds = workload.sessions_per_hour * self.seconds_per_session
        return max(self.devices_for_state, math.ceil(seconds / efficiency / 3600))


def trainers(
    workload: Workload, model: ModelSize, device: Device, *, lora: bool, reference: bool = False
) -> Trainers:
    """One update with each session, whose tree is packed so that each token is computed once.

    ``lora``: adapters alone are trained; their own size is left out. ``reference``: a KL penalty
    scores each session with the reference policy too, which below adapters is there already.
    """
    per_parameter = _FULL_STATE + (_REFERENCE if reference else 0)
    state = float(model.weight_bytes if lora else per_parameter * model.parameters)
    # Forward, and backward for the activations and, where weights learn, for the weights.
    passes = (2 if lora else 3) + reference
    matrices = 2 * passes * model.multiplied * workload.tokens
    attention = (3 + reference) * model.attention_flops * workload.tokens**2 / 2
    return Trainers(
        state,
        max(1, math.ceil(state / (CACHE_SHARE * device.memory))),
        (matrices + attention) / device.flops,
    )
