"""A stand-in for vLLM's CPU worker: it remembers what it was told to load."""

from typing import Any


class CPUWorker:
    rank = 0

    def __init__(self, model_config: Any, model_runner: Any) -> None:
        self.model_config = model_config
        self.model_runner = model_runner
        self.weight_transfer_engine: Any = None
        self.loaded: list[str] = []
        self._weight_update_active = False

    def reload_weights(self, *, weights_path: str) -> None:
        self.model_config.model = weights_path
        self.loaded.append(weights_path)

    def start_weight_update(self) -> None:
        if self._weight_update_active:
            raise RuntimeError("start_weight_update called while a weight update is active")
        self.weight_transfer_engine.start_weight_update()
        self._weight_update_active = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if not self._weight_update_active:
            raise RuntimeError("start_weight_update must be called before update_weights")
        try:
            self.weight_transfer_engine.update_weights(update_info)
        except BaseException:
            self._weight_update_active = False
            raise

    def finish_weight_update(self) -> None:
        if not self._weight_update_active:
            raise RuntimeError("finish_weight_update called without start_weight_update")
        self.weight_transfer_engine.finish_weight_update()
        self._weight_update_active = False

    def reset_encoder_cache(self) -> None:
        self.loaded.append("encoder cache reset")

    def reset_mm_cache(self) -> None: ...
