"""Optional filters, which leave sessions, turns or tokens out of the loss.

Each is off unless a run names it. A filter sees a session whose group has its baseline already, so
it never shifts one. The sessions and tokens that it leaves out are counted under its name.
:mod:`resample_on_correct` chooses within a group before the baseline is taken, and :mod:`overlong`
changes a reward.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bridle.reconstruct.samples.sample import Episode
from bridle.registry import Registry

Filtered = bool | Collection[str] | Sequence[NDArray[np.bool_]]
"""The decision of a filter: whether the session may be trained on, the ids of the calls that are
not trained, or ``bool[T]`` for each sample, true at the tokens that are not trained."""
Filter = Callable[[Episode], Filtered]
"""A function that decides what of a session may be trained on."""

FILTERS: Final[Registry[Filter]] = Registry(
    "filter",
    "bridle.filters",
    {
        "failed_calls": "bridle.trainer.filters.failed_calls:every_call_answered",
        "over_turn": "bridle.trainer.filters.over_turn:within_its_turns",
        "truncated": "bridle.trainer.filters.truncated:ended_by_itself",
        "void_turn": "bridle.trainer.filters.void_turn:no_void_turn",
    },
)


def register_filter(name: str) -> Callable[[Filter], Filter]:
    """Return a decorator that makes a function the filter that configurations name ``name``."""
    return FILTERS.registered(name)
