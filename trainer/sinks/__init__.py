"""The sinks of a run's numbers: the store always, and the trackers that its configuration names.

Each tracker is one module, which imports its package when a run opens it.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Final

from bridle.errors import UsageError
from bridle.extras import install_command
from bridle.registry import Registry
from bridle.trainer.sinks.base import MetricSink as MetricSink
from bridle.trainer.sinks.base import SinkGroup as SinkGroup
from bridle.trainer.sinks.base import TrackedRun as TrackedRun
from bridle.trainer.sinks.store import StoreSink as StoreSink

SINKS: Final[Registry[Callable[[TrackedRun], MetricSink]]] = Registry(
    "sink",
    "bridle.sinks",
    {
        "tensorboard": "bridle.trainer.sinks.tensorboard:open_board",
        "wandb": "bridle.trainer.sinks.wandb:WandbSink",
        "mlflow": "bridle.trainer.sinks.mlflow:MlflowSink",
        "trackio": "bridle.trainer.sinks.trackio:TrackioSink",
    },
)
"""The trackers. A part is a function, or a class, that opens one for a run."""

_EXTRAS: Final = ("wandb", "mlflow", "trackio")
"""The trackers whose package has their name, and so has the extra that installs it."""


class MissingTracker(UsageError):
    """A run names a tracker whose package is not installed."""


def require_sink(name: str) -> None:
    """Raise an error if a tracker cannot be used.

    A tracker that does not exist raises the errors of :meth:`bridle.registry.Registry.get`.
    :class:`MissingTracker` is raised if its package is not installed.
    """
    if name in _EXTRAS and find_spec(name) is None:
        raise MissingTracker(f"the sink {name} needs its package: {install_command(name)}")
    SINKS.get(name)
