"""A benchmark of publishing to a vLLM by directory and by transfer.

It measures the time of a publish, and of the engine's pause.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from bridle.engine.vllm.transfer import VllmTransfer
from bridle.store.records import PolicyRecord
from bridle.trainer.policy.model import checkpoint_tensors, load_policy, vocabulary_size
from bridle.trainer.publish.publisher import Publisher, default_probes
from bridle.trainer.publish.transfer import TransferPublisher


class Stopwatch(VllmTransfer):
    """A transfer client that records the length of each pause."""

    def __init__(self, base_url: str) -> None:
        super().__init__(base_url)
        self.paused: list[float] = []

    def pause(
        self, mode: Literal["keep", "wait", "abort"] = "wait", clear_cache: bool = True
    ) -> None:
        self._began = time.perf_counter()
        super().pause(mode, clear_cache)

    def resume(self) -> None:
        super().resume()
        self.paused.append(time.perf_counter() - self._began)


def measure_publishing(engine_url: str, policy: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """Publish ``rounds`` versions of ``policy`` by directory and by transfer, in turns.

    Return medians in seconds.

    A publish is everything that the trainer waits for, verification included. The directory that is
    written after a transfer is awaited outside of both times.
    """
    model = load_policy(policy)
    probes = default_probes(vocabulary_size(model))
    serving = PolicyRecord("bench", 0, 0.0, path=str(policy))
    seconds: dict[str, list[float]] = {"directory": [], "transfer": []}
    paused: dict[str, list[float]] = {"directory": [], "transfer": []}
    with Stopwatch(engine_url) as engine:
        by_directory = Publisher(
            engine, folder / "by-directory", serving, probes=probes, announce=engine.stamp
        )
        by_transfer = TransferPublisher(
            {"engine": engine},
            folder / "by-transfer",
            serving,
            probes=probes,
            announce=lambda version, _name: engine.stamp(version),
        )
        publishers: dict[str, Callable[..., Any]] = {
            "directory": by_directory.publish,
            "transfer": by_transfer.publish,
        }
        with by_transfer:
            for version in range(1, 2 * rounds + 1):
                through = "transfer" if version % 2 else "directory"
                _move(model)
                began = time.perf_counter()
                publishers[through](model, version)
                seconds[through].append(time.perf_counter() - began)
                paused[through].append(engine.paused[-1])
                by_transfer.wait_written()
    size = sum(tensor.nbytes for tensor in checkpoint_tensors(model).values())
    return {
        "megabytes": round(size / 1e6, 1),
        "seconds": {name: round(statistics.median(each), 3) for name, each in seconds.items()},
        "paused_seconds": {
            name: round(statistics.median(each), 3) for name, each in paused.items()
        },
    }


@torch.no_grad()
def _move(model: torch.nn.Module) -> None:
    """Change every weight a little, as a training step does."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 1e-3)
