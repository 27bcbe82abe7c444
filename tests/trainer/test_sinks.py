"""A run's numbers reach the trackers that it names."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from bridle.extras import install_command
from bridle.registry import UnknownPart
from bridle.trainer.sinks import SINKS, MissingTracker, TrackedRun, require_sink


class Kept:
    """A tracker of a user's."""

    def __init__(self, run: TrackedRun) -> None:
        self.run = run
        self.rows: list[tuple[int, Mapping[str, float]]] = []

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, values))

    def close(self) -> None:
        pass


def test_a_tracker_of_the_users_is_named_by_its_file(tmp_path: Path) -> None:
    run = TrackedRun("run_1", tmp_path, {"seed": 0})
    name = f"{__file__}:Kept"
    require_sink(name)
    sink = SINKS.get(name)(run)
    sink.write(0, {"reward/mean": 0.5})
    assert isinstance(sink, Kept) or type(sink).__name__ == "Kept"
    assert sink.rows == [(0, {"reward/mean": 0.5})]  # type: ignore[attr-defined]


def test_a_tracker_that_is_not_there_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UnknownPart, match=r"no sink 'wandbb'.*tensorboard, wandb, mlflow, trackio"):
        require_sink("wandbb")
    monkeypatch.setattr("bridle.trainer.sinks.find_spec", lambda name: None)
    with pytest.raises(MissingTracker, match=re.escape(install_command("trackio"))):
        require_sink("trackio")
    require_sink("tensorboard")


WRITES = """
import sys
from pathlib import Path
from bridle.trainer.sinks import SINKS, TrackedRun
run = TrackedRun("run_1", Path(sys.argv[2]), {"settings": {"seed": 0}, "policy": "tiny"})
for steps, value in ((range(3), 1.0), (range(2, 4), 9.0)):  # killed, and resumed from step 2
    sink = SINKS.get(sys.argv[1])(run)
    for step in steps:
        sink.write(step, {"reward/mean": value})
    sink.close()
"""
READS = {
    "wandb": """
import json, struct
from wandb.proto import wandb_internal_pb2
rows = []
for file in sorted(Path(sys.argv[1]).glob("wandb/offline-run-*/*.wandb")):
    log, at = file.read_bytes(), 7  # LevelDB's log format: a checksum, a length, a kind, a record
    while at + 7 <= len(log):
        _, length, kind = struct.unpack_from("<IHB", log, at)
        assert kind == 1, "a record of more than one part"
        record = wandb_internal_pb2.Record.FromString(log[at + 7 : at + 7 + length])
        at += 7 + length
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            found = {each.key or each.nested_key[0]: each.value_json for each in items}
            rows.append((json.loads(found["step"]), json.loads(found["reward/mean"])))
print(dict(rows))
""",
    "mlflow": """
from mlflow import MlflowClient
client = MlflowClient()
(run,) = client.search_runs([client.get_experiment_by_name("bridle").experiment_id])
assert (run.info.run_name, run.info.status) == ("run_1", "FINISHED")
assert run.data.params["policy"] == "tiny"
history = client.get_metric_history(run.info.run_id, "reward/mean")
print({each.step: each.value for each in sorted(history, key=lambda each: each.timestamp)})
""",
    "trackio": """
import json, sqlite3
(file,) = Path(sys.argv[1]).glob("trackio/bridle.db")
store = sqlite3.connect(file)
assert store.execute("SELECT DISTINCT run_name FROM metrics").fetchall() == [("run_1",)]
rows = store.execute("SELECT step, metrics FROM metrics ORDER BY id")
print({step: json.loads(metrics)["reward/mean"] for step, metrics in rows})
""",
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("tracker", "package"),
    [("wandb", "wandb"), ("mlflow", "mlflow-skinny"), ("trackio", "trackio")],
)
def test_a_resumed_run_is_one_run_of_the_tracker(
    tracker: str, package: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The real package, in a folder of its own, offline; of a step taken twice the later counts."""
    folder = tmp_path_factory.mktemp(tracker)
    packages, output = folder / "packages", folder / "run"
    output.mkdir()
    installs = [sys.executable, "-m", "pip", "install", "-q", "--target", str(packages), package]
    subprocess.run(installs, check=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(packages),
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"file://{output / 'mlruns'}",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": str(output / "trackio"),
    }

    def python(source: str, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", source, *arguments],
            env=environment,
            cwd=output,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""

    python(WRITES, tracker, str(output))
    head = "import sys\nfrom pathlib import Path\n"
    read = ast.literal_eval(python(head + READS[tracker], str(output)))
    assert read == {0: 1.0, 1: 1.0, 2: 9.0, 3: 9.0}
