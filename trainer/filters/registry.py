"""Filters by name."""

from __future__ import annotations

from collections.abc import Callable

from bridle.reconstruct.samples.sample import Episode
from bridle.trainer.registry import Registry

Filter = Callable[[Episode], bool]
"""A function that returns whether a session may be trained on."""

FILTERS: Registry[Filter] = Registry("filter")


def register_filter(name: str) -> Callable[[Filter], Filter]:
    """Return a decorator that makes a function the filter that configurations name ``name``."""
    return FILTERS.register(name)
