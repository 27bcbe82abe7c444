"""Measure the growth of a cost: double its input until the time is measurable."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import pytest

LEAST_S = 0.01
"""CPU time of the smallest measured input: below it the clock and the caches are measured."""
WORST = 2.3
"""Growth per doubling above which the cost is not linear: 2 is linear, 4 is quadratic."""
_TRIES = 12
"""Number of measurements before a growth counts; the first one within the bound ends them."""

Prepare = Callable[[int], Callable[[], object]]
"""Makes an input of this size, and returns what is to be measured on it."""


def cpu_s(work: Callable[[], object]) -> float:
    """CPU time of this process for ``work``, in seconds."""
    gc.disable()
    try:
        started = time.process_time()
        work()
        return time.process_time() - started
    finally:
        gc.enable()


def growth(
    prepare: Prepare, size: int, most: int = 1 << 17, tries: int = _TRIES
) -> tuple[float, int]:
    """Return the growth per doubling from n to 4n, and n.

    The size n is the first from ``size`` on, doubled, that takes :data:`LEAST_S`. The growth is 1.0
    where size ``most`` takes less.
    """
    while (taken := cpu_s(prepare(size))) < LEAST_S:
        size *= 8 if taken < LEAST_S / 16 else 2
        if size > most:
            return 1.0, size
    small = large = grown = float("inf")
    for _ in range(tries):
        # Other work on the machine only adds to a time, and may add to one of a pair alone.
        one, other = cpu_s(prepare(size)), cpu_s(prepare(4 * size))
        small, large = min(small, one), min(large, other)
        grown = min(grown, large / small, other / one)
        if grown**0.5 <= WORST:
            break
    return float(grown**0.5), size


@pytest.fixture(name="cpu_s")
def seconds() -> Callable[[Callable[[], object]], float]:
    """Measures CPU time as :func:`cpu_s` does."""
    return cpu_s


@pytest.fixture(name="growth")
def measured_growth() -> Callable[..., tuple[float, int]]:
    """Measures as :func:`growth` does."""
    return growth


@pytest.fixture
def is_linear() -> Callable[[Prepare, int], None]:
    """Fails where the cost of a prepared work grows by more than :data:`WORST` per doubling."""

    def check(prepare: Prepare, size: int) -> None:
        grown, measured = growth(prepare, size)
        assert grown <= WORST, f"×{grown:.1f} per doubling from {measured} on"

    return check
