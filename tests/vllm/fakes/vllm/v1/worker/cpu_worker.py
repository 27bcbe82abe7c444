"""A stand-in for vLLM's CPU worker: it remembers what it was told to load."""

from typing import Any


class CPUWorker:
    rank = 0

    def __init__(self, model_config: Any, model_runner: Any) -> None:
        self.model_config = model_config
        self.model_runner = model_runner
        self.loaded: list[str] = []

    def reload_weights(self, *, weights_path: str) -> None:
        self.model_config.model = weights_path
        self.loaded.append(weights_path)
