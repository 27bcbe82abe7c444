"""The publication of new weights to an engine.

The weights are verified by logprobs, or the old ones are restored. :class:`Publisher` writes a
model directory ``v00000012/`` once, whole or not at all, and has the engine reload from it, which
works with any engine in any process. :mod:`bridle.trainer.publish.swap` makes and checks the
change-over.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bridle.store.records import PolicyRecord
from bridle.trainer.config import PublishConfig
from bridle.trainer.policy.durable import atomic_directory
from bridle.trainer.policy.weights import Policy, weights_of
from bridle.trainer.publish.swap import EngineControl, PublishError, VerifiedSwap

Announce = Callable[[int], None]
"""A function that receives the version that the engine serves from now on, while it is paused."""
Record = Callable[[PolicyRecord], None]
"""A function that receives every published version, verified or not."""


class Publisher:
    """A publisher of one run's versions to one engine through directories.

    ``serving`` is the version that the engine serves now, with its model directory; a failed
    publish goes back to it. Further versions are recorded under its run and name.
    """

    def __init__(
        self,
        engine: EngineControl,
        directory: Path,
        serving: PolicyRecord,
        *,
        probes: Sequence[NDArray[np.int64]],
        config: PublishConfig | None = None,
        announce: Announce = lambda _version: None,
        record: Record = lambda _policy: None,
    ) -> None:
        self.engine = engine
        self.directory = directory
        self.served = Path(str(serving.path))
        self.served_version = serving.version
        self.config = config or PublishConfig()
        self._first = serving
        self._origin = self.served
        self._swap = VerifiedSwap(engine, probes, self.config, announce)
        self._record = record

    def serves(self, policy: Policy) -> bool:
        """Return whether the engine scores the probes as ``policy`` does.

        The engine may have been restarted.
        """
        return self._swap.serves(policy)

    def publish(self, policy: Policy, version: int) -> PolicyRecord:
        """Write, load and verify ``policy`` as ``version``.

        Raises :class:`PublishError` if the engine fails to load it or scores it differently, and
        :class:`bridle.engine.contract.client.EngineError` if the engine cannot be reached before
        anything was changed.
        """
        before = self._swap.scores_before()
        path, digest = write_version(self.directory, policy, version, self._origin)
        try:
            gap = self._swap.run(
                policy,
                load=lambda: self.engine.reload_weights(path),
                version=version,
                restore=lambda: self.engine.reload_weights(self.served),
                previous=self.served_version,
                before=before,
            )
        except PublishError as error:
            self._record(policy_record(self._first, version, error.gap, str(path), digest))
            raise
        self.served, self.served_version = path, version
        prune(self.directory, self.config.keep, self.served)
        record = policy_record(self._first, version, gap, str(path), digest, verified=True)
        self._record(record)
        return record


def write_version(
    directory: Path,
    policy: Policy,
    version: int,
    origin: Path,
    tensors: Mapping[str, Tensor] | None = None,
) -> tuple[Path, str]:
    """Write ``policy`` as ``v00000012/`` in ``directory``, whole or not at all.

    Return path and digest.

    ``origin`` is the model directory that the policy began as, and has its tokenizer. A policy that
    computes in 16 bits, as its engine then does, is written in the 16 bits of ``origin``; one that
    computes in float32 is written in float32. ``tensors`` are written instead of its own weights
    (:func:`bridle.trainer.policy.model.checkpoint_tensors`).
    """
    weights = weights_of(policy)
    types_from = origin if weights.is_rounded else None
    path = directory / f"v{version:08d}"
    with atomic_directory(path) as scratch:
        weights.save(scratch, origin, tensors, types_from)
    return path, weights_digest(path)


def prune(directory: Path, keep: int, served: Path) -> None:
    """Remove all but the ``keep`` newest published directories; never the one being served."""
    versions = sorted(path for path in directory.glob("v*") if path.is_dir())
    for path in versions[: -max(1, keep)]:
        if path != served:
            shutil.rmtree(path)


def policy_record(
    of: PolicyRecord,
    version: int,
    gap: float | None,
    path: str | None = None,
    digest: str | None = None,
    *,
    verified: bool = False,
) -> PolicyRecord:
    """Return the record of another version of the policy whose version ``of`` is."""
    return replace(
        of,
        version=version,
        path=path,
        digest=digest,
        verified=verified,
        logprob_gap=gap if gap is not None and math.isfinite(gap) else None,
        published_at=time.time(),
    )


def default_probes(vocabulary: int, *, seed: int = 0) -> list[NDArray[np.int64]]:
    """Return sequences of 16 and 64 random token ids.

    Every layer and position counts in their scores.
    """
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocabulary, length) for length in (16, 64)]


def weights_digest(directory: Path) -> str:
    """Return the SHA-256 hex over the safetensors files of a model directory.

    The files are taken in the order of their names.
    """
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()
