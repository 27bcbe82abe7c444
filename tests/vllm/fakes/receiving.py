"""Our worker and a control client of it, with no vLLM and no HTTP between them.

What it loads is a Transformers model. What it is sent comes through a real store and group.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from bridle_transfer import BridleTransferEngine
from bridle_worker import BridleWorker

from bridle.engine.contract.client import EngineRefused
from bridle.engine.vllm.transfer import TransferRoute, VllmTransfer
from bridle.trainer.policy.model import load_policy, score_sequence

INFO = {
    "weight_transfer_config": {"backend": "bridle"},
    "model_config": {"dtype": "torch.float32"},
    "device_config": {"device": "cpu"},
}


class LoadedModel:
    """The model that the worker loads into, in place of vLLM's model."""

    def __init__(self, directory: Path) -> None:
        self.policy: Any = load_policy(directory)
        self.steps: list[str] = []

    def load_weights(self, tensors: Any) -> None:
        self.steps.append("load")
        self.policy.load_state_dict(dict(tensors), strict=False)

    def modules(self) -> list[Any]:
        return []


class Receiving(VllmTransfer):
    def __init__(self, directory: Path, **route: Any) -> None:
        super().__init__("http://engine", route=TransferRoute(**{"stall_seconds": 20.0, **route}))
        self.start(directory)

    def start(self, directory: Path) -> None:
        """Start, and start again, as vLLM does."""
        self.loaded = LoadedModel(directory)
        self.worker: Any = BridleWorker(SimpleNamespace(model=str(directory)), None)
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_index=0, world_size=1, rank=0),
            model_config=self.worker.model_config,
        )
        self.worker.weight_transfer_engine = BridleTransferEngine(
            None, config, torch.device("cpu"), self.loaded
        )
        self.version = "default"

    @torch.no_grad()
    def score(self, token_ids: Any, *, model: str | None = None) -> Any:
        return score_sequence(self.loaded.policy, np.asarray(token_ids)).numpy()

    def _send(self, method: str, path: str, **kwargs: Any) -> dict[str, Any]:
        try:
            return self._answer(path, kwargs.get("json", {})) or {}
        except (ValueError, RuntimeError) as error:
            raise EngineRefused(f"{path} answered 500: {error}", status=500) from error

    def _answer(self, path: str, sent: dict[str, Any]) -> dict[str, Any] | None:
        engine = self.worker.weight_transfer_engine
        if path == "/server_info":
            return {"vllm_config": INFO}
        if path == "/get_world_size":
            return {"world_size": 1}
        if path == "/init_weight_transfer_engine":
            engine.init_transfer_engine(engine.parse_init_info(sent["init_info"]))
        elif path == "/start_weight_update":
            self.worker.start_weight_update()
        elif path == "/update_weights":
            self.worker.update_weights(sent["update_info"])
        elif path == "/finish_weight_update":
            self.worker.finish_weight_update()
            self.version = sent["weight_version"]
        elif path == "/update_weight_version":
            self.version = sent["new_version"]
        elif path == "/collective_rpc":
            getattr(self.worker, sent["method"])(*sent["args"])
        return None
