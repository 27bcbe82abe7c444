"""The MLflow sink.

It reads ``MLFLOW_EXPERIMENT_NAME``; MLflow itself reads ``MLFLOW_TRACKING_URI``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from bridle.trainer.sinks.base import TrackedRun

TAG = "bridle.run_id"
"""The tag by which a later attempt finds the run."""
LONGEST_VALUE = 6000
"""Maximum number of characters of a setting in MLflow."""


class MlflowSink:
    """One run of MLflow, which later attempts continue."""

    def __init__(self, run: TrackedRun) -> None:
        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "bridle")
        experiment = self._client.get_experiment_by_name(name)
        chosen = experiment.experiment_id if experiment else self._client.create_experiment(name)
        found = self._client.search_runs([chosen], f"tags.`{TAG}` = '{run.run_id}'", max_results=1)
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        created = self._client.create_run(chosen, tags={TAG: run.run_id}, run_name=run.run_id)
        self._run = created.info.run_id
        settings = [Param(name, str(value)[:LONGEST_VALUE]) for name, value in run.config.items()]
        self._client.log_batch(self._run, params=settings)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run)
