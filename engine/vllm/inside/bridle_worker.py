"""The worker class that vLLM runs for us: weight reloads that are refused whole or done whole.

This file is imported by vLLM's worker process, not by Bridle: its folder is on that process's
PYTHONPATH and it may use nothing but vLLM and what vLLM itself needs. It changes three things about
``reload_weights``, the call behind ``POST /collective_rpc``:

* A directory that cannot be loaded is refused before a layer is touched. vLLM 0.32 moves all layers
  to the meta device first, so that a reload that fails half-way kills the engine at the next step.
* On CPU, layers that share one weight are packed again (:mod:`bridle_packing`).
* The served directory and version are written to ``BRIDLE_SERVED_FILE``, so that a restart begins
  with them.

It also takes weights from the trainer's memory (:mod:`bridle_transfer`).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from bridle_checkpoint import check_directory
from bridle_packing import repack_shared_weights
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.platforms import current_platform

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker

SERVED_FILE = "BRIDLE_SERVED_FILE"

WeightTransferEngineFactory.register_engine("bridle", "bridle_transfer", "BridleTransferEngine")


class BridleWorker(Worker):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """vLLM's worker for this platform, with safe reloads."""

    _transferred = False
    """True if the served weights came by a transfer and no directory of them is known."""
    _version: str | None = None
    """The policy version of the served weights; ``None`` until it is known."""

    def reload_weights(self, *args: Any, weights_path: str | None = None, **kwargs: Any) -> None:
        """Load the checkpoint in ``weights_path`` in place. Raise ValueError if it does not fit.

        After a ValueError the weights are those from before the call.
        """
        if weights_path is not None:
            check_directory(Path(self.model_config.model), Path(weights_path))
            kwargs["weights_path"] = weights_path
        super().reload_weights(*args, **kwargs)
        self._transferred, self._version = False, None
        if current_platform.is_cpu():
            repack_shared_weights(self.model_runner.get_model())
        if weights_path is not None:
            self._remember(directory=weights_path, version=None)

    def start_weight_update(self) -> None:
        """Begin to take over the weights that a transfer brought."""
        # A trainer that ended in mid-update has left it open, and nothing was loaded.
        self._weight_update_active = False
        super().start_weight_update()

    def finish_weight_update(self) -> None:
        """Load the weights that a transfer brought. There is no directory of them yet."""
        super().finish_weight_update()
        self.reset_encoder_cache()
        self.reset_mm_cache()
        self._transferred, self._version = True, None

    def remember_version(self, version: str) -> None:
        """Record that the weights served now are policy version ``version``.

        The version of transferred weights is recorded with their directory, once there is one.
        Until then a restart begins with the directory and version that were recorded before.
        """
        self._version = version
        if not self._transferred:
            self._remember(directory=self.model_config.model, version=version)

    def remember_directory(self, directory: str, version: str) -> None:
        """Record that ``directory`` holds the transferred weights that are served as ``version``.

        Raise ValueError if these are not served, or cannot be read there.
        """
        if not self._transferred or self._version != version:
            raise ValueError(f"version {version} is not served from a transfer")
        check_directory(Path(self.model_config.model), Path(directory))
        self.model_config.model = directory
        self._transferred = False
        self._remember(directory=directory, version=version)

    def _remember(self, *, directory: str, version: str | None) -> None:
        path = os.environ.get(SERVED_FILE)
        if path is None or self.rank != 0:
            return
        stats = [(file.name, file.stat()) for file in sorted(Path(directory).glob("*.safetensors"))]
        files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        scratch = Path(f"{path}.{os.getpid()}.tmp")
        scratch.write_text(json.dumps({"directory": directory, "version": version, "files": files}))
        scratch.replace(path)
