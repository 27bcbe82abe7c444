"""The embedded engine: any local Transformers causal LM behind the contract, no GPU needed.

It is the default where vLLM does not run. :class:`EmbeddedEngine` serves it from the same process;
``python -m bridle.engine.embedded`` serves it from its own.
"""

from bridle.engine.embedded.backend import EmbeddedBackend, EmbeddedSettings
from bridle.engine.embedded.engine import EmbeddedEngine
from bridle.engine.embedded.model import UnservableModel, WeightsMismatch
from bridle.engine.embedded.scheduler import SchedulerLimits

__all__ = [
    "EmbeddedBackend",
    "EmbeddedEngine",
    "EmbeddedSettings",
    "SchedulerLimits",
    "UnservableModel",
    "WeightsMismatch",
]
