"""The device that computes: this machine, measured, or a GPU by its maker's data sheet."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_SECONDS: Final = 0.5
"""Seconds for which each rate is measured."""


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    memory: float
    """The size of its memory in bytes."""
    flops: float
    """Dense operations per second in the precision that models are served in."""
    bandwidth: float
    """Bytes per second that it reads from its memory."""


DATA_SHEETS: Final = {
    device.name: device
    for device in (
        Device("a100", 80e9, 312e12, 2.039e12),
        Device("l40s", 48e9, 362e12, 0.864e12),
        Device("h100", 80e9, 989e12, 3.35e12),
        Device("h200", 141e9, 989e12, 4.8e12),
        Device("b200", 180e9, 2250e12, 7.7e12),
    )
}
"""The SXM boards (L40S: PCIe) with bfloat16 and without sparsity, by NVIDIA's data sheets."""


def this_machine() -> Device:
    """Return this machine's first GPU, or else its CPU.

    It is measured with a second of matrix products and of reading memory.
    """
    import torch

    if torch.cuda.is_available():
        kind, dtype, side = "cuda", torch.bfloat16, 8192
        memory = float(torch.cuda.get_device_properties(0).total_memory)
        name = torch.cuda.get_device_name(0)
        wait: Callable[[], None] = torch.cuda.synchronize
    else:
        kind, dtype, side = "cpu", torch.float32, 768
        memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        name, wait = f"this machine's CPU, {torch.get_num_threads()} threads", _nothing
    square = torch.rand(side, side, dtype=dtype, device=kind)
    product = torch.empty_like(square)
    flops = 2 * side**3 * _rate(lambda: torch.mm(square, square, out=product), wait)
    # A vector is multiplied with it as in decoding; no cache holds it.
    tall = torch.rand(64 * side, side, dtype=dtype, device=kind)
    vector = torch.rand(side, dtype=dtype, device=kind)
    read = tall.numel() * tall.element_size()
    return Device(name, memory, flops, read * _rate(lambda: torch.mv(tall, vector), wait))


def _rate(work: Callable[[], object], wait: Callable[[], None]) -> float:
    """Return how often ``work`` can be done per second.

    The best time counts, because other work on this machine makes single times longer.
    """
    work()
    wait()
    ends, best = time.perf_counter() + _SECONDS, float("inf")
    while (began := time.perf_counter()) < ends:
        work()
        wait()
        best = min(best, time.perf_counter() - began)
    return 1 / best


def _nothing() -> None:
    """Return at once: a CPU's work is complete when its call returns."""
