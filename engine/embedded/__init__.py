"""The embedded engine: any local Transformers causal LM behind the contract, no GPU needed.

It is the default where vLLM does not run. :class:`EmbeddedEngine` serves it from the same process;
``python -m engine.embedded`` serves it from its own.
"""

from engine.embedded.backend import EmbeddedBackend, EmbeddedSettings
from engine.embedded.engine import EmbeddedEngine
from engine.embedded.model import UnservableModel, WeightsMismatch
from engine.embedded.scheduler import SchedulerLimits

__all__ = [
    "EmbeddedBackend",
    "EmbeddedEngine",
    "EmbeddedSettings",
    "SchedulerLimits",
    "UnservableModel",
    "WeightsMismatch",
]
