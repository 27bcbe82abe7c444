"""Where a run's numbers go: TensorBoard's event files, the store, or both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch.utils.tensorboard import SummaryWriter

from bridle.store.writing.writer import Writer


class MetricSink(Protocol):
    """Takes the numbers of each step."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Keep ``values`` of ``step``. Names look like ``reward/mean``; a step comes once, except
        after a resume, where the later one counts."""

    def close(self) -> None:
        """Flush what is not on disk yet."""


class TensorBoardSink:
    """Event files in ``directory``, one flush per step. What an earlier attempt wrote there of the
    first step that is written, and of later ones, is void."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: SummaryWriter | None = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            self._writer = SummaryWriter(str(self._directory), purge_step=step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class StoreSink:
    """The store's ``metrics`` table, under ``run_id``. The store's writer stays the caller's."""

    def __init__(self, writer: Writer, run_id: str) -> None:
        self._writer = writer
        self._run_id = run_id

    def write(self, step: int, values: Mapping[str, float]) -> None:
        # SQL has no portable NaN or infinity; TensorBoard shows them.
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._writer.record_metrics(self._run_id, step, finite)

    def close(self) -> None:
        """Nothing to do: every write is committed."""


class SinkGroup:
    """Several sinks as one."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.write(step, values)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
