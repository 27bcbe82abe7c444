"""The worker class that vLLM runs for us: weight reloads that are refused whole or done whole.

This file is imported by vLLM's worker process, not by Bridle: its folder is on that process's
PYTHONPATH and it may use nothing but vLLM and what vLLM itself needs. It changes three things about
``reload_weights``, the call behind ``POST /collective_rpc``:

* A directory that cannot be loaded is refused before a layer is touched. vLLM 0.32 moves all layers
  to the meta device first, so that a reload that fails half-way kills the engine at the next step.
* On CPU, layers that share one weight are packed again. vLLM packs a linear weight into oneDNN's
  layout when it is loaded. A reload repeats that for each layer that a tensor in the checkpoint
  loads; an output layer tied to the embedding has no such tensor, keeps its old packed copy, and
  would go on predicting with the previous version's output matrix.
* What is served is written to ``BRIDLE_SERVED_FILE``, so that a restart begins with it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from vllm.platforms import current_platform

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker

SERVED_FILE = "BRIDLE_SERVED_FILE"

Shapes = dict[str, tuple[int, ...]]


class BridleWorker(Worker):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """vLLM's worker for this platform, with safe reloads."""

    def reload_weights(self, *args: Any, weights_path: str | None = None, **kwargs: Any) -> None:
        """Load the checkpoint in ``weights_path`` in place; raises ValueError when it does not fit.

        After a ValueError the weights are those from before the call.
        """
        if weights_path is not None:
            check_replacement(Path(self.model_config.model), Path(weights_path))
            kwargs["weights_path"] = weights_path
        super().reload_weights(*args, **kwargs)
        if current_platform.is_cpu():
            repack_shared_weights(self.model_runner.get_model())
        if weights_path is not None:
            self._remember(directory=weights_path, version=None)

    def remember_version(self, version: str) -> None:
        """Note that the weights served now are policy version ``version``."""
        self._remember(directory=self.model_config.model, version=version)

    def _remember(self, *, directory: str, version: str | None) -> None:
        path = os.environ.get(SERVED_FILE)
        if path is None or self.rank != 0:
            return
        stats = [(file.name, file.stat()) for file in sorted(Path(directory).glob("*.safetensors"))]
        files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        scratch = Path(f"{path}.{os.getpid()}.tmp")
        scratch.write_text(json.dumps({"directory": directory, "version": version, "files": files}))
        scratch.replace(path)


def check_replacement(served: Path, directory: Path) -> None:
    """Raise ValueError unless ``directory`` holds the tensors that ``served`` holds.

    Names and shapes must be equal; an output layer may be left out, or be there, where the
    embeddings are tied. Without files in ``served`` (a hub name, a pruned version) there is nothing
    to compare with.
    """
    shapes = checkpoint_shapes(directory)
    if not any(served.glob("*.safetensors")):
        return
    expected = checkpoint_shapes(served)
    tied = json.loads((directory / "config.json").read_text()).get("tie_word_embeddings", False)
    different = {
        name
        for name in expected.keys() | shapes.keys()
        if expected.get(name) != shapes.get(name) and not (tied and name.endswith("lm_head.weight"))
    }
    if different:
        shown = ", ".join(sorted(different)[:3])
        raise ValueError(
            f"{directory} is not a version of the model in {served}: {len(different)} tensors "
            f"differ in name or shape ({shown}); the weights were not changed"
        )


def checkpoint_shapes(directory: Path) -> Shapes:
    """Shape of each tensor of a safetensors checkpoint, from the files' headers."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{directory} holds no safetensors files; the weights were not changed")
    shapes: Shapes = {}
    for file in files:
        try:
            # Opening compares the header with the file's length: a cut file is found here.
            with safe_open(str(file), framework="pt") as checkpoint:
                for name in checkpoint.keys():  # noqa: SIM118 - not a dict
                    shapes[name] = tuple(checkpoint.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file}: {error}; the weights were not changed") from error
    return shapes


def repack_shared_weights(model: Any) -> None:
    """Pack the weight of layers that share one parameter again, in each of them."""
    sharing: dict[int, list[Any]] = {}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is not None and weight.numel() and hasattr(layer, "cpu_linear"):
            sharing.setdefault(id(weight), []).append(layer)
    for layers in sharing.values():
        if len(layers) > 1:
            for layer in layers:
                layer.quant_method.process_weights_after_loading(layer)
