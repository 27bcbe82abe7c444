"""Publishing LoRA adapters: each version under a name and a path of its own.

vLLM keeps the prefix cache per adapter name, and loads a path once. An adapter loaded again under
the same name would be served from blocks that the earlier one computed. With a fresh name per
version this cannot happen, and calls in flight finish with the version that they began with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bridle.engine.contract.client import EngineClient, EngineError, EngineRefused

LOAD_ADAPTER: Final = "/v1/load_lora_adapter"
UNLOAD_ADAPTER: Final = "/v1/unload_lora_adapter"

Scores = Sequence[NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class LoadedLora:
    """An adapter that an engine serves."""

    name: str
    """The model name for requests."""
    directory: Path
    version: int
    logprob_gap: float
    """Mean |engine − trainer| logprob over the probes, in nats."""


class AdapterPublisher(EngineClient):
    """A client that publishes versions of one adapter to the vLLM at ``base_url``.

    The ``keep`` newest versions stay loaded, at least 1. vLLM must have been started with room for
    as many (``VllmOptions.lora_adapters``).
    """

    def __init__(
        self,
        base_url: str,
        *,
        base_name: str,
        tolerance: float = 1e-3,
        keep: int = 2,
        timeout: float = 120.0,
        api_key: str | None = None,
    ) -> None:
        super().__init__(base_url, timeout=timeout, api_key=api_key)
        self.base_name = base_name
        self.tolerance = tolerance
        self.keep = max(1, keep)
        self.loaded: list[LoadedLora] = []
        """Loaded versions, oldest first; the last one is the policy."""
        self._paths: set[Path] = set()

    def publish(
        self,
        directory: str | Path,
        version: int,
        *,
        probes: Sequence[NDArray[np.int64]],
        expected: Scores,
    ) -> LoadedLora:
        """Load the PEFT adapter in ``directory`` as ``version`` and verify its scores.

        ``expected[i]`` is the trainer's logprobs of ``probes[i]`` given their predecessors,
        ``float32[T-1]``. If the engine scores them differently, unload the adapter and raise
        :class:`bridle.engine.contract.client.EngineError`. Raise ValueError for a version or a path
        that was published before.
        """
        path = Path(directory).absolute()
        name = f"{self.base_name}-v{version:08d}"
        if path in self._paths or any(version <= adapter.version for adapter in self.loaded):
            raise ValueError(f"{name} from {path}: each version needs a new number and a new path")
        self._request("POST", LOAD_ADAPTER, json={"lora_name": name, "lora_path": str(path)})
        self._paths.add(path)
        try:
            gap = self._gap(name, probes, expected)
        except EngineError:
            self._unload(name)
            raise
        if not gap <= self.tolerance:
            self._unload(name)
            raise EngineRefused(
                f"adapter {name}: mean |engine - trainer| logprob is {gap:.2e}, more than "
                f"{self.tolerance:.0e}; it was unloaded, the version before is still served"
            )
        adapter = LoadedLora(name, path, version, gap)
        self.loaded.append(adapter)
        while len(self.loaded) > self.keep:
            self._unload(self.loaded.pop(0).name)
        return adapter

    def _gap(self, name: str, probes: Sequence[NDArray[np.int64]], expected: Scores) -> float:
        scores = [self.score(probe.tolist(), model=name) for probe in probes]
        return float(np.abs(np.concatenate(scores) - np.concatenate(expected)).mean())

    def _unload(self, name: str) -> None:
        self._request("POST", UNLOAD_ADAPTER, json={"lora_name": name})
