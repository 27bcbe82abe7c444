"""The publication of new weights to several engines; engines that fail are left behind.

Every engine makes the change-over of :mod:`bridle.trainer.publish.swap` by itself, all at the same
time, and is announced by itself. An engine that fails or is away keeps its earlier version, so that
a router that spreads calls by version takes it out of rotation; the next publish brings it up to
date. A publish fails only if no engine takes the version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from bridle.engine.contract.client import EngineError
from bridle.store.records import PolicyRecord
from bridle.trainer.config import PublishConfig
from bridle.trainer.policy.weights import Policy
from bridle.trainer.publish.publisher import Record, policy_record, prune, write_version
from bridle.trainer.publish.swap import EngineControl, PublishError, VerifiedSwap

Engine = TypeVar("Engine", bound=EngineControl)


class Replicas(Generic[Engine]):
    """The engines that one run publishes to, by name, and what they serve.

    ``serving`` is what they serve now; an engine that fails goes back to it. Further versions are
    recorded under its run and name. ``announce(version, name)`` is called while that engine is
    paused, right after a load. If no engine takes a new version, ``retract(version)`` is called
    with the one that is served again.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        directory: Path,
        serving: PolicyRecord,
        *,
        probes: Sequence[NDArray[np.int64]],
        config: PublishConfig | None = None,
        announce: Callable[[int, str], None] = lambda _version, _name: None,
        retract: Callable[[int], None] = lambda _version: None,
        record: Record = lambda _policy: None,
    ) -> None:
        if not engines:
            raise ValueError("there must be an engine to publish to")
        self.engines = dict(engines)
        self.directory = directory
        self.served = Path(str(serving.path))
        self.served_version = serving.version
        self.config = config or PublishConfig()
        self.lagging: dict[str, str] = {}
        """Engines that do not serve the version of the last publish, with the cause."""
        self._first = serving
        self._origin = self.served
        self._retract = retract
        self._record = record

        def swap(name: str, engine: Engine) -> VerifiedSwap:
            return VerifiedSwap(
                engine, probes, self.config, lambda version: announce(version, name)
            )

        self._swaps = {name: swap(name, engine) for name, engine in self.engines.items()}

    def in_rotation(self) -> list[str]:
        """Return the engines that serve the version of the last publish."""
        return [name for name in self.engines if name not in self.lagging]

    def serves(self, policy: Policy) -> bool:
        """Return whether all engines in rotation answer and score the probes as ``policy`` does."""
        swaps = [self._swaps[name] for name in self.in_rotation()]
        try:
            return all(swap.serves(policy) for swap in swaps)
        except EngineError:
            return False

    def _on_each(self, swap: Callable[[str], float]) -> tuple[dict[str, float], dict[str, str]]:
        """Swap all engines at the same time.

        Return the gap of each that took the weights, and the error of each of the others.
        """
        gaps: dict[str, float] = {}
        lagging: dict[str, str] = {}
        with ThreadPoolExecutor(len(self.engines), "publish") as pool:
            running = {name: pool.submit(swap, name) for name in self.engines}
            for name, swapping in running.items():
                try:
                    gaps[name] = swapping.result()
                except (EngineError, PublishError) as error:
                    lagging[name] = str(error)
        return gaps, lagging


class ReplicaPublisher(Replicas[EngineControl]):
    """A publisher through directories, which every engine reads.

    It is made as :class:`Replicas` is.
    """

    def publish(self, policy: Policy, version: int) -> PolicyRecord:
        """Write ``policy`` as ``version`` once, and have every engine load and verify it.

        The record's gap is the largest of the engines that serve it. Raises :class:`PublishError`
        if none does.
        """
        path, digest = write_version(self.directory, policy, version, self._origin)
        gaps, lagging = self._on_each(lambda name: self._swap(name, policy, path, version))
        if not gaps:
            self._retract(self.served_version)
            self._record(policy_record(self._first, version, None, str(path), digest))
            causes = "; ".join(f"{name}: {why}" for name, why in lagging.items())
            raise PublishError(f"no engine serves version {version}: {causes}", gap=None)
        self.served, self.served_version, self.lagging = path, version, lagging
        prune(self.directory, self.config.keep, self.served)
        gap = max(gaps.values())
        record = policy_record(self._first, version, gap, str(path), digest, verified=True)
        self._record(record)
        return record

    def _swap(self, name: str, policy: Policy, path: Path, version: int) -> float:
        engine, swap = self.engines[name], self._swaps[name]
        return swap.run(
            policy,
            load=lambda: engine.reload_weights(path),
            version=version,
            restore=lambda: engine.reload_weights(self.served),
            previous=self.served_version,
            before=swap.scores_before(),
        )
