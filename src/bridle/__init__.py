"""Bridle trains the model inside any agent: record its calls, build samples, train, serve again.

The names below are the interface for programs. Each is imported when it is first used, so that
recording and reading never load torch. The command line is :mod:`bridle.cli`.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridle.errors import BridleError as BridleError
    from bridle.harnesses.adapters.base import Adapter as Adapter
    from bridle.harnesses.client import Client as Client
    from bridle.harnesses.sandboxes.base import Sandbox as Sandbox
    from bridle.harnesses.scorers import FinishedSession as FinishedSession
    from bridle.harnesses.tasks.task import Task as Task
    from bridle.harnesses.verifiers import Delivery as Delivery
    from bridle.harnesses.verifiers import Score as Score
    from bridle.reconstruct.dataset import export as export
    from bridle.reconstruct.dataset import open_store as open_store
    from bridle.run.config import RunConfig as RunConfig
    from bridle.run.evaluation import evaluate as evaluate
    from bridle.run.local import train as train
    from bridle.run.rollouts import rollout as rollout
    from bridle.trainer.credit import register_advantage as register_advantage
    from bridle.trainer.filters import register_filter as register_filter
    from bridle.trainer.losses.losses import register_loss as register_loss

_HOMES = {
    "Adapter": "bridle.harnesses.adapters.base",
    "BridleError": "bridle.errors",
    "Client": "bridle.harnesses.client",
    "Delivery": "bridle.harnesses.verifiers",
    "FinishedSession": "bridle.harnesses.scorers",
    "RunConfig": "bridle.run.config",
    "Score": "bridle.harnesses.verifiers",
    "Sandbox": "bridle.harnesses.sandboxes.base",
    "Task": "bridle.harnesses.tasks.task",
    "evaluate": "bridle.run.evaluation",
    "export": "bridle.reconstruct.dataset",
    "open_store": "bridle.reconstruct.dataset",
    "register_advantage": "bridle.trainer.credit",
    "register_filter": "bridle.trainer.filters",
    "register_loss": "bridle.trainer.losses.losses",
    "rollout": "bridle.run.rollouts",
    "train": "bridle.run.local",
}
"""The module that defines each name."""

__all__ = [
    "Adapter",
    "BridleError",
    "Client",
    "Delivery",
    "FinishedSession",
    "RunConfig",
    "Sandbox",
    "Score",
    "Task",
    "evaluate",
    "export",
    "open_store",
    "register_advantage",
    "register_filter",
    "register_loss",
    "rollout",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return metadata.version("bridle-rl")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
