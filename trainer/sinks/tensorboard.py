"""TensorBoard's event files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from bridle.trainer.sinks.base import TrackedRun


class TensorBoardSink:
    """Event files in ``directory``, flushed once per step.

    The first write voids the events that an earlier attempt wrote there for this step and later
    ones.
    """

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


def open_board(run: TrackedRun) -> TensorBoardSink:
    """Return the sink that writes below the run's output."""
    return TensorBoardSink(run.directory / "tensorboard")
