"""Optional filters, which leave sessions out of the loss; each is off unless a run names it.

A filter sees a session whose group has its baseline already, so it never shifts one. The sessions
that it leaves out are counted under its name. :mod:`resample_on_correct` chooses within a group
before the baseline is taken, and :mod:`overlong` changes a reward.
"""

from bridle.trainer.filters import failed_calls as failed_calls
from bridle.trainer.filters import over_turn as over_turn
from bridle.trainer.filters import truncated as truncated
from bridle.trainer.filters import void_turn as void_turn
from bridle.trainer.filters.registry import FILTERS as FILTERS
from bridle.trainer.filters.registry import Filter as Filter
from bridle.trainer.filters.registry import register_filter as register_filter
