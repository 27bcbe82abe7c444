"""A stand-in for vLLM's base class of weight transfer engines."""

from typing import Any


class WeightTransferEngine:
    init_info_cls: Any
    update_info_cls: Any

    def __init__(self, _config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.vllm_config = vllm_config
        self.parallel_config = vllm_config.parallel_config
        self.model_config = vllm_config.model_config
        self.device = device
        self.model = model

    def parse_init_info(self, init_info: dict[str, Any]) -> Any:
        return self.init_info_cls(**init_info)

    def parse_update_info(self, update_info: dict[str, Any]) -> Any:
        return self.update_info_cls(**update_info)
