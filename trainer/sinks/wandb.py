"""The W&B sink.

It reads ``WANDB_PROJECT``; W&B itself reads ``WANDB_API_KEY`` and ``WANDB_MODE``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import wandb

from bridle.trainer.sinks.base import TrackedRun


class WandbSink:
    """One run of W&B, which later attempts continue.

    Steps are a column of their own, ``step``, because W&B's count never goes back and a resumed run
    takes steps again.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "bridle"),
            id=run.run_id,
            name=run.run_id,
            dir=str(run.directory),
            config=dict(run.config),
            resume="allow",
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()
