"""The sinks of a run's numbers: the store always, and the trackers that its configuration names.

Each tracker is one module, which imports its package when a run opens it. A user's own tracker is
named as ``FILE.py:NAME``; it is a function from a :class:`TrackedRun` to a :class:`MetricSink`.
"""

from bridle.trainer.sinks.base import MetricSink as MetricSink
from bridle.trainer.sinks.base import SinkGroup as SinkGroup
from bridle.trainer.sinks.base import TrackedRun as TrackedRun
from bridle.trainer.sinks.registry import SINKS as SINKS
from bridle.trainer.sinks.registry import require_sink as require_sink
from bridle.trainer.sinks.store import StoreSink as StoreSink
