"""The Trackio sink.

It reads ``TRACKIO_PROJECT``; Trackio itself reads ``TRACKIO_DIR`` and ``TRACKIO_SPACE_ID``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import trackio

from bridle.trainer.sinks.base import TrackedRun


class TrackioSink:
    """One run of Trackio, which later attempts continue."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "bridle"),
            name=run.run_id,
            config=dict(run.config),
            resume="allow",
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
