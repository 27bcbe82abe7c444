"""The longest session that a step trains on one device, and what bfloat16 changes of its scores."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from bridle.bench.train import TrainSettings, long_item, one_step
from bridle.trainer.batch.prepare import TrainItem
from bridle.trainer.config import ComputeConfig, PackingConfig
from bridle.trainer.policy.compute import UnsupportedCompute, choose_device, place
from bridle.trainer.policy.model import score_sequence

FIRST: Final = 16_384
HALVINGS: Final = 2
"""Number of steps between the last length that fits and the first that does not."""
COMPARED: Final = 4_096
"""Number of tokens whose scores are compared."""


@dataclass(frozen=True, slots=True)
class LongestFigures:
    """The longest session that fits the device, and a step on it."""

    tokens: int
    """Tokens of the session, of which the last quarter is trained; 0 if the first did not fit."""
    refused: int | None
    """The shortest length that did not fit, in tokens; ``None`` if all did."""
    seconds: float
    """Seconds of a step on the longest session."""
    peak_gib: float
    """Peak memory of the device in that step, with the policy and its optimizer."""

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RoundingFigures:
    """Differences of scores in bfloat16 from those in float32, in nats a token."""

    mean: float
    p99: float
    largest: float

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


def measure_longest(
    load: Callable[..., nn.Module],
    settings: TrainSettings,
    most: int,
    progress: Callable[[str], object],
) -> dict[str, Any]:
    """Measure the longest session and, where all weights are trained, what rounding changes.

    Raises :class:`bridle.trainer.policy.compute.UnsupportedCompute` on a CPU.
    """
    device, lora = settings.device, settings.lora_rank > 0
    if choose_device(device).type == "cpu":
        raise UnsupportedCompute("a CPU has no memory of its own to fill: use --device cuda")
    policy = load("qwen3", settings.precision if lora else "float32")
    found = {} if lora else {"rounding": rounding(policy, device).as_data()}
    return {**found, "longest": longest_session(policy, most, progress).as_data()}


def longest_session(
    model: nn.Module, most: int, progress: Callable[[str], object]
) -> LongestFigures:
    """Find the longest session, of up to ``most`` tokens, of which a step fits the accelerator."""
    fits, refused = LongestFigures(0, None, 0.0, 0.0), most + 1
    length, step = FIRST, 0
    one_step(model, *_session(128))  # compiles
    while length <= most:
        found = _step(model, length)
        progress(f"{length} tokens: {found.as_data() if found else 'out of memory'}")
        if found is None:
            refused = length
        else:
            fits = found
        if refused > most:
            length *= 2
            continue
        if step == HALVINGS or fits.tokens == 0:
            break
        step += 1
        length = (fits.tokens + refused) // 2
    return replace(fits, refused=refused if refused <= most else None)


def _session(length: int) -> tuple[tuple[TrainItem], PackingConfig]:
    return (long_item(length),), PackingConfig(layout="tree", max_tokens=length)


def _step(model: nn.Module, length: int) -> LongestFigures | None:
    """Measure a step on ``length`` tokens, or return ``None`` if the device has too little."""
    items, packing = _session(length)
    torch.accelerator.reset_peak_memory_stats()
    torch.accelerator.synchronize()
    started = time.perf_counter()
    try:
        one_step(model, items, packing)
        torch.accelerator.synchronize()
    except torch.OutOfMemoryError:
        return None
    finally:
        model.zero_grad(set_to_none=True)
        gc.collect()
        torch.accelerator.empty_cache()
    return LongestFigures(
        tokens=length,
        refused=None,
        seconds=time.perf_counter() - started,
        peak_gib=torch.accelerator.max_memory_allocated() / 2**30,
    )


@torch.no_grad()
def rounding(model: nn.Module, device: str) -> RoundingFigures:
    """Compare the scores of a policy in float32 with its own in bfloat16, in which it is left."""
    ids = long_item(COMPARED).sample.token_ids.astype(np.int64)
    exact = score_sequence(model, ids)
    rounded = score_sequence(place(model, ComputeConfig(device=device, precision="bfloat16")), ids)
    gap = (exact - rounded).abs()
    return RoundingFigures(float(gap.mean()), float(gap.quantile(0.99)), float(gap.max()))
