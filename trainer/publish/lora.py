"""The publication of LoRA adapters alone, to an engine that keeps the model below them.

One engine serves the adapters of several policies, each version under a name of its own. A version
is loaded beside the one before, scored, and announced only if the engine scores it as the trainer
does. Nothing is paused and nothing goes back: an adapter that is refused has served no call, and
calls in flight end with the version that they began with.

The name has a digest of the adapter's files, because engines keep their prefix caches by name
(:mod:`bridle.engine.vllm.lora`): other weights never get the cached blocks of an earlier adapter.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bridle.engine.contract.client import EngineError, EngineRefused
from bridle.store.records import PolicyRecord
from bridle.trainer.config import PublishConfig
from bridle.trainer.policy.durable import atomic_directory
from bridle.trainer.policy.weights import Policy, Probes, weights_of
from bridle.trainer.publish.publisher import Record, policy_record, weights_digest
from bridle.trainer.publish.swap import PublishError, mean_gap, tolerance_of, too_far


class LoraEngine(Protocol):
    """An engine that serves adapters; :class:`bridle.engine.vllm.lora.VllmLora` is one."""

    def load_lora(self, name: str, directory: str | Path) -> None: ...

    def unload_lora(self, name: str) -> None: ...

    def loras(self) -> list[str]: ...

    def score(
        self, token_ids: Sequence[int], *, model: str | None = None
    ) -> NDArray[np.float32]: ...


class LoraPublisher:
    """A publisher of one policy's adapters to one engine.

    ``beginning`` is version 0 of the policy: the model below the adapters. Further versions are
    recorded under its run and name. ``announce(version, name)`` is called with the name under which
    the engine serves a version, once that is verified. The ``config.keep`` newest versions stay
    loaded, at least 2, so that calls in flight and their sessions' next calls find theirs.
    """

    def __init__(
        self,
        engine: LoraEngine,
        directory: Path,
        beginning: PolicyRecord,
        *,
        probes: Probes,
        config: PublishConfig,
        announce: Callable[[int, str], None],
        record: Record = lambda _policy: None,
    ) -> None:
        self.engine = engine
        self.directory = directory
        self.config = config
        self.served: list[tuple[str, Path]] = []
        """The name and the directory of each version that stays loaded, the oldest first."""
        self._first = beginning
        self._probes = tuple(probes)
        self._announce = announce
        self._record = record
        self._own = re.compile(rf"{re.escape(beginning.name)}-v\d{{8}}-[0-9a-f]{{8}}")

    def serves(self, policy: Policy) -> bool:
        """Return whether the engine answers, and scores the newest version as ``policy`` does.

        An engine that was restarted has no adapter any more.
        """
        try:
            return bool(self.served) and self._gap(policy, self.served[-1][0]) <= tolerance_of(
                policy, self.config
            )
        except EngineRefused:
            return False

    def publish(self, policy: Policy, version: int) -> PolicyRecord:
        """Write, load, verify and announce the adapters of ``policy`` as ``version``.

        Raises :class:`PublishError` if the engine refuses them or scores them differently. It then
        serves the version before.
        """
        path = self.directory / f"v{version:08d}"
        with atomic_directory(path) as scratch:
            weights_of(policy).save_lora(scratch, Path(str(self._first.path)))
        digest = weights_digest(path)
        name = f"{self._first.name}-v{version:08d}-{digest[:8]}"
        try:
            gap = self._load(policy, version, name, path)
        except PublishError as error:
            self._record(policy_record(self._first, version, error.gap, str(path), digest))
            raise
        self._announce(version, name)
        self.served = [one for one in self.served if one[0] != name] + [(name, path)]
        self._remove_older()
        record = policy_record(self._first, version, gap, str(path), digest, verified=True)
        self._record(record)
        return record

    def _load(self, policy: Policy, version: int, name: str, path: Path) -> float:
        gap: float | None = None
        try:
            if name in self.engine.loras():
                self.engine.unload_lora(name)
            self.engine.load_lora(name, path)
            gap = self._gap(policy, name)
        except EngineError as error:
            what = f"version {version} could not be loaded: {error}"
        else:
            tolerance = tolerance_of(policy, self.config)
            if gap <= tolerance:
                return gap
            self.engine.unload_lora(name)
            what = too_far(version, gap, tolerance)
        raise PublishError(f"{what}; the adapter {name} has served no call", gap=gap)

    def _gap(self, policy: Policy, name: str) -> float:
        """Return the mean |engine − trainer| logprob over the probes now, in nats."""
        scores = [self.engine.score(probe.tolist(), model=name) for probe in self._probes]
        return mean_gap(scores, weights_of(policy).scores(self._probes))

    def _remove_older(self) -> None:
        """Unload all but the newest versions, those of earlier runs too, and delete their files.

        The files of a loaded version stay: the engine reads them again if it made room for others.
        """
        self.served = self.served[-max(2, self.config.keep) :]
        names = {name for name, _ in self.served}
        for name in self.engine.loras():
            if self._own.fullmatch(name) and name not in names:
                self.engine.unload_lora(name)
        paths = {path for _, path in self.served}
        for path in self.directory.glob("v*"):
            if path.is_dir() and path not in paths:
                shutil.rmtree(path)
