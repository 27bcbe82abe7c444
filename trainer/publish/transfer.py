"""The publication of weights to engines from this process's memory, without a disk in between.

The weights go to the engine while it still serves the old ones, and then change places with them in
a pause (:mod:`bridle.trainer.publish.swap`). Their directory is written afterwards, in the
background, while the engine serves on. A restart begins with this directory, and a failed publish
goes back to it, so the next publish waits for it. An engine that is restarted before it is written
comes back with the version before, and reports that version.

Several engines are each sent the weights, all at the same time; one that fails is left behind as in
:mod:`bridle.trainer.publish.replicas`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Protocol, Self

from safetensors.torch import load_file
from torch import Tensor

from bridle.engine.contract.client import EngineError
from bridle.store.records import PolicyRecord
from bridle.trainer.policy.weights import Policy, weights_of
from bridle.trainer.publish.publisher import policy_record, prune, write_version
from bridle.trainer.publish.replicas import Replicas
from bridle.trainer.publish.swap import EngineControl, PublishError

log = logging.getLogger(__name__)


class TransferEngine(EngineControl, Protocol):
    """An engine that receives weights; :class:`bridle.engine.vllm.transfer.VllmTransfer` is one."""

    def send(self, tensors: Mapping[str, Tensor]) -> None: ...

    def load_weights(self, version: int) -> None: ...

    def remember_directory(self, directory: str | Path, version: int) -> None: ...


class TransferPublisher(Replicas[TransferEngine]):
    """A publisher by transfer.

    It is made as ``Replicas`` is, and is a context manager that ends when the last directory is
    written.

    ``served`` is the directory of the version that was published last, once it is written. A
    version is recorded when it is served, and again when its directory is there.
    """

    _writing: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait_written()
        finally:
            self._background.shutdown()

    @cached_property
    def _background(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "write version")

    def wait_written(self) -> None:
        """Wait until the directory of the last version is written; raise the error of its writing.

        Until then there would be nothing to go back to, and versions would pile up in memory.
        """
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def publish(self, policy: Policy, version: int) -> PolicyRecord:
        """Send ``policy`` as ``version`` to every engine, have each load and verify it.

        Raises :class:`PublishError` if no engine serves it in the end.
        """
        self.wait_written()
        tensors = weights_of(policy).tensors()
        gaps, lagging = self._on_each(lambda name: self._swap(name, policy, tensors, version))
        if not gaps:
            self._retract(self.served_version)
            self._record(policy_record(self._first, version, None))
            causes = "; ".join(f"{name}: {why}" for name, why in lagging.items())
            raise PublishError(f"no engine serves version {version}: {causes}", gap=None)
        self.served_version, self.lagging = version, lagging
        record = policy_record(self._first, version, max(gaps.values()), verified=True)
        self._record(record)
        # Training goes on changing the model's own.
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        self._writing = self._background.submit(self._write, policy, copies, record)
        return record

    def _swap(
        self, name: str, policy: Policy, tensors: Mapping[str, Tensor], version: int
    ) -> float:
        engine, swap = self.engines[name], self._swaps[name]
        before = swap.scores_before()
        engine.send(tensors)
        return swap.run(
            policy,
            load=lambda: engine.load_weights(version),
            version=version,
            restore=lambda: self._restore(engine),
            previous=self.served_version,
            before=before,
        )

    def _restore(self, engine: TransferEngine) -> None:
        files = sorted(self.served.glob("*.safetensors"))
        engine.send({name: each for file in files for name, each in load_file(file).items()})
        engine.load_weights(self.served_version)

    def _write(self, policy: Policy, tensors: Mapping[str, Tensor], record: PolicyRecord) -> None:
        """Write the directory of a version that is served; a restart then begins with it."""
        path, digest = write_version(self.directory, policy, record.version, self._origin, tensors)
        self.served = path
        known = [self._tell(name, path, record.version) for name in self.in_rotation()]
        # An engine that is just being restarted may be reading an older one.
        if all(known):
            prune(self.directory, self.config.keep, self.served)
        self._record(dataclasses.replace(record, path=str(path), digest=digest))

    def _tell(self, name: str, path: Path, version: int) -> bool:
        """Make an engine begin with ``path`` after a restart. Return whether it accepted."""
        try:
            self.engines[name].remember_directory(path, version)
        except EngineError as error:
            extra = {"engine": name, "version": version, "error": str(error)}
            log.warning("engine_does_not_know_the_directory", extra=extra)
            return False
        return True
