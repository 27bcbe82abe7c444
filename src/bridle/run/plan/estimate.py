"""Estimate the engines and trainers for a workload, a model and a device, by the device's roofline.

A device computes no faster than its arithmetic and reads no faster than its memory. ``efficiency``
is the share of that which real engines and trainers reach; a recorded run gives it.
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
"""The share of a device's memory that an engine takes, for weights and key-value cache."""
_FULL_STATE: Final = 16
"""Bytes per parameter: the float32 weight, its gradient and Adam's two moments."""
_REFERENCE: Final = 4
"""Bytes per parameter of a KL penalty's reference policy: its float32 weight."""


@dataclass(frozen=True, slots=True)
class Engines:
    devices_per_engine: int
    """Number of devices over which one copy of the model is spread, so that its weights and one
    session's cache fit."""
    parallel: int
    """Number of sessions at a time in one engine: as asked, or as many as fit its memory."""
    seconds_per_session: float
    """Seconds of one engine per session, with ``parallel`` sessions at a time, at the roofline."""

    def needed(self, workload: Workload, efficiency: float) -> int:
        """Return the number of engines for the whole workload."""
        seconds = workload.sessions_per_hour * self.seconds_per_session
        return max(1, math.ceil(seconds / efficiency / 3600))


def engines(workload: Workload, model: ModelSize, device: Device, parallel: float) -> Engines:
    """Return the engines for ``parallel`` sessions at a time in one engine.

    Its prefix cache holds the sessions' histories.

    Raise :class:`bridle.errors.UsageError` if ``parallel`` is less than one.
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
    """Bytes of the weights, gradients, the optimizer's moments and a reference, without
    activations."""
    devices_for_state: int
    seconds_per_session: float
    """Seconds of one device per session, at its peak arithmetic."""

    def needed(self, workload: Workload, efficiency: float) -> int:
        """Return the number of devices for the whole workload."""
        seconds = workload.sessions_per_hour * self.seconds_per_session
        return max(self.devices_for_state, math.ceil(seconds / efficiency / 3600))


def trainers(
    workload: Workload, model: ModelSize, device: Device, *, lora: bool, reference: bool = False
) -> Trainers:
    """Return the trainers for one update with each session.

    The session's tree is packed so that each token is computed once.

    With ``lora``, only adapters are trained; their own size is left out. With ``reference``, a KL
    penalty scores each session with the reference policy too; with adapters, the base model is the
    reference, which is there already.
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
