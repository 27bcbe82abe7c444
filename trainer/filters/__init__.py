"""Filters that a run may name, each off until it does: what is left out of the loss, and why.

A filter sees a session whose group has its baseline already, so it never shifts one; its name is
the reason by which what it leaves out is counted. :mod:`resample_on_correct` chooses within a group
before the baseline is taken, and :mod:`overlong` changes a reward.
"""

from bridle.trainer.filters import failed_calls as failed_calls
from bridle.trainer.filters import over_turn as over_turn
from bridle.trainer.filters import truncated as truncated
from bridle.trainer.filters import void_turn as void_turn
from bridle.trainer.filters.registry import FILTERS as FILTERS
from bridle.trainer.filters.registry import Filter as Filter
from bridle.trainer.filters.registry import register_filter as register_filter
