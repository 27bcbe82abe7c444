"""Trackers by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec

from bridle.errors import UsageError
from bridle.extras import install_command
from bridle.trainer.registry import Registry
from bridle.trainer.sinks.base import MetricSink, TrackedRun

OpenSink = Callable[[TrackedRun], MetricSink]
"""A function that opens a tracker for a run."""

SINKS: Registry[OpenSink] = Registry("sink")


class MissingTracker(UsageError):
    """A run names a tracker whose package is not installed."""


def require_sink(name: str) -> None:
    """Raise :class:`bridle.trainer.registry.UnknownPart` for an unknown name, and
    :class:`MissingTracker` if the tracker's package is not installed."""
    SINKS.find(name)
    if name in _CLASSES and find_spec(name) is None:
        raise MissingTracker(f"the sink {name} needs its package: {install_command(name)}")


@SINKS.register("tensorboard")
def _tensorboard(run: TrackedRun) -> MetricSink:
    from bridle.trainer.sinks.tensorboard import TensorBoardSink

    return TensorBoardSink(run.directory / "tensorboard")


_CLASSES = {"wandb": "WandbSink", "mlflow": "MlflowSink", "trackio": "TrackioSink"}
"""The class of each tracker, in the module here that has the name of its package."""


def _register(name: str) -> None:
    @SINKS.register(name)
    def open_sink(run: TrackedRun) -> MetricSink:
        module = importlib.import_module(f"bridle.trainer.sinks.{name}")
        sink: MetricSink = getattr(module, _CLASSES[name])(run)
        return sink


for _name in _CLASSES:
    _register(_name)
