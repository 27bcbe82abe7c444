"""New weights to the engine, proven by logprobs, or the old ones back.

The weights are written once, as a model directory ``v00000012/`` that appears whole. The engine is
paused, told to reload, and resumed. Then fixed token sequences are scored on both sides: an engine
may accept a reload and go on serving stale layers, so nothing counts as published before the
numbers agree. When they do not, the previous weights are put back and :class:`PublishError` tells.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from engine.client import EngineError
from store.records import PolicyRecord
from trainer.config import PublishConfig
from trainer.durable import atomic_directory
from trainer.model import save_policy, score_sequence


class EngineControl(Protocol):
    """What publishing needs of an engine; :class:`engine.client.EngineClient` is one."""

    def pause(
        self, mode: Literal["keep", "wait", "abort"] = "wait", clear_cache: bool = True
    ) -> None: ...

    def resume(self) -> None: ...

    def reload_weights(self, directory: str | Path) -> None: ...

    def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]: ...


class PublishError(Exception):
    """The engine does not serve the new weights. It serves the previous ones, or see the text."""


class Publisher:
    """Publishes the versions of one run to one engine.

    ``served`` and ``served_version`` are the model directory and policy version that the engine
    serves now; a failed publish goes back to them. ``announce(version)`` is called while the engine
    is paused, right after a reload (also when going back), so that whoever stamps policy versions
    changes over at that moment. ``record`` is given each verified or failed policy version.
    """

    def __init__(
        self,
        engine: EngineControl,
        directory: Path,
        *,
        run_id: str,
        served: Path,
        served_version: int,
        probes: Sequence[NDArray[np.int64]],
        config: PublishConfig | None = None,
        announce: Callable[[int], None] = lambda _version: None,
        record: Callable[[PolicyRecord], None] = lambda _policy: None,
    ) -> None:
        self.engine = engine
        self.directory = directory
        self.run_id = run_id
        self.served = served
        self.served_version = served_version
        self.config = config or PublishConfig()
        self._tokenizer_from = served
        self._probes = tuple(probes)
        self._announce = announce
        self._record = record

    def publish(self, model: nn.Module, version: int) -> PolicyRecord:
        """Write, load and verify ``model`` as ``version``.

        Raises :class:`PublishError` when the engine fails to load it or scores it differently, and
        :class:`engine.client.EngineError` when it cannot be reached before anything was changed.
        """
        path = self.directory / f"v{version:08d}"
        before = self._engine_scores()
        with atomic_directory(path) as scratch:
            save_policy(model, scratch, self._tokenizer_from)
        gap: float | None = None
        failure: EngineError | None = None
        try:
            self._swap(path, version)
            gap = mean_gap(self._engine_scores(), self._trainer_scores(model))
        except EngineError as error:
            failure = error
        verified = gap is not None and gap <= self.config.tolerance
        policy = PolicyRecord(
            run_id=self.run_id,
            version=version,
            path=str(path),
            digest=weights_digest(path),
            verified=verified,
            logprob_gap=gap,
            published_at=time.time(),
        )
        self._record(policy)
        if not verified:
            raise self._rolled_back(version, gap, failure, before) from failure
        self.served, self.served_version = path, version
        self._prune()
        return policy

    def _swap(self, path: Path, version: int) -> None:
        self.engine.pause(mode=self.config.pause_mode, clear_cache=True)
        try:
            self.engine.reload_weights(path)
            self._announce(version)
        finally:
            self.engine.resume()

    def _rolled_back(
        self,
        version: int,
        gap: float | None,
        failure: EngineError | None,
        before: Sequence[NDArray[np.float32]],
    ) -> PublishError:
        """Put the previous weights back; the error says how that went.

        ``before`` is how the engine scored the probes with those weights.
        """
        what = (
            f"version {version} could not be loaded: {failure}"
            if gap is None
            else f"version {version}: mean |engine - trainer| logprob is {gap:.2e}, "
            f"more than {self.config.tolerance:.0e}"
        )
        try:
            self._swap(self.served, self.served_version)
            after = self._engine_scores()
        except EngineError as error:
            return PublishError(
                f"{what}; version {self.served_version} could not be put back either ({error}): "
                "restart the engine before going on"
            )
        if not mean_gap(after, before) <= self.config.tolerance:
            return PublishError(
                f"{what}; version {self.served_version} was put back, but the engine does not "
                "score as it did before: restart the engine before going on"
            )
        return PublishError(f"{what}; the engine serves version {self.served_version} again")

    def _engine_scores(self) -> list[NDArray[np.float32]]:
        return [self.engine.score(probe.tolist()) for probe in self._probes]

    @torch.no_grad()
    def _trainer_scores(self, model: nn.Module) -> list[NDArray[np.float32]]:
        return [score_sequence(model, probe).float().cpu().numpy() for probe in self._probes]

    def _prune(self) -> None:
        """Remove old published directories; never the one being served."""
        versions = sorted(path for path in self.directory.glob("v*") if path.is_dir())
        for path in versions[: -max(1, self.config.keep)]:
            if path != self.served:
                shutil.rmtree(path)


def mean_gap(scores: Sequence[NDArray[np.float32]], others: Sequence[NDArray[np.float32]]) -> float:
    """Mean |difference| over all tokens of all probes, nats; NaN when either side has one."""
    return float(np.abs(np.concatenate(scores) - np.concatenate(others)).mean())


def default_probes(vocabulary: int, *, seed: int = 0) -> list[NDArray[np.int64]]:
    """Sequences of 16 and 64 random token ids: every layer and position counts in their scores."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocabulary, length) for length in (16, 64)]


def weights_digest(directory: Path) -> str:
    """SHA-256 hex over the safetensors files of a model directory, in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()
