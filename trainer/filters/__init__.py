"""Optional filters, which leave sessions out of the loss; each is off unless a run names it.

A filter sees a session whose group has its baseline already, so it never shifts one. The sessions
that it leaves out are counted under its name. :mod:`resample_on_correct` chooses within a group
before the baseline is taken, and :mod:`overlong` changes a reward.
"""

from collections.abc import Callable
from typing import Final

from bridle.reconstruct.samples.sample import Episode
from bridle.registry import Registry

Filter = Callable[[Episode], bool]
"""A function that returns whether a session may be trained on."""

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
