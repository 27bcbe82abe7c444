"""A stand-in for vLLM's layerwise reload: it only says that it began and ended."""

from typing import Any


def initialize_layerwise_reload(model: Any) -> None:
    model.steps.append("begin")


def finalize_layerwise_reload(model: Any, _model_config: Any) -> None:
    model.steps.append("end")
