"""Test the ends of runs: each sets their status, and a reader sees that a killed one is gone."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import update
from typer.testing import CliRunner

from bridle.cli.program import app
from bridle.run.attempts import attempt, attempt_figures
from bridle.store.reading.queries import Reader
from bridle.store.reading.run_states import run_state
from bridle.store.records import RunRecord
from bridle.store.schema.tables import writers
from bridle.store.writing.writer import Writer
from bridle.viewer.app import viewer_app
from bridle.viewer.rendering import Source
from support.processes import until

PROGRAM = """
import sys, time
from bridle.cli.serving import leave_on_sigterm
from bridle.run.attempts import attempt
from bridle.store.records import RunRecord

leave_on_sigterm()
with attempt(sys.argv[1], RunRecord("r", "train", 1.0), RunRecord("r.eval", "eval", 1.0)):
    print("begun", flush=True)
    time.sleep(60)
"""


def begun(url):
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, url], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"begun\n"
    return process


def ended(process, number):
    process.send_signal(number)
    process.wait()
    process.stdout.close()


def states(reader):
    return {run.id: (run.status, run.ended_at is not None) for run in reader.runs()}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_a_signal_ends_is_stopped(url, reader, number):
    process = begun(url)
    assert states(reader) == {"r": ("running", False), "r.eval": ("running", False)}
    ended(process, number)
    assert states(reader) == {"r": ("stopped", True), "r.eval": ("stopped", True)}
    assert reader.run("r").reason == "interrupted"


def test_a_killed_run_is_seen_to_be_lost_and_goes_on_when_it_is_started_again(url, reader):
    process = begun(url)
    state = run_state(reader, reader.run("r"))
    assert (state.status, state.lost) == ("running", False)
    ended(process, signal.SIGKILL)
    assert reader.run("r").status == "running", "nobody has written its end"
    state = run_state(reader, reader.run("r"))
    assert state.lost
    assert "its process is gone: last seen" in state.text
    assert abs(state.seen_at - time.time()) < 60
    for command in ("audit", "sessions"):
        said = CliRunner().invoke(app, [command, "--store", url, "--run", "r"])
        assert "lost, its process is gone: last seen" in " ".join(said.output.split())
    page = TestClient(viewer_app(Source(reader, url)))
    for path in ("/runs", "/runs/r"):
        assert "lost" in page.get(path).text
    with attempt(url, RunRecord("r", "train", 5.0)):
        assert run_state(reader, reader.run("r")).status == "running"
        assert reader.run("r").reason is None
        first, second = reader.attempts("r")
        assert (first.status, first.reason) == ("failed", "the process that ran it died")
        assert first.ended_at >= first.started_at
        assert (second.number, second.status) == (2, "running")
        assert reader.run("r.eval").status == "failed", "that one was not started again"
    assert reader.run("r").status == "completed"
    assert reader.run("r").started_at == 1.0
    assert [one.status for one in attempt_figures(reader, "r")] == ["failed", "completed"]


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (ValueError("one\nline"), "failed", "ValueError: one line"),
        (KeyboardInterrupt(), "stopped", "interrupted"),
        (SystemExit(3), "failed", "exit status 3"),
        (SystemExit(0), "completed", None),
    ],
)
def test_what_ends_an_attempt_is_recorded_in_one_line(url, reader, error, status, reason):
    with pytest.raises(type(error)), attempt(url, RunRecord("r", "train", 1.0)):
        raise error
    run = reader.run("r")
    assert (run.status, run.reason) == (status, reason)
    (one,) = reader.attempts("r")
    assert (one.status, one.reason, one.ended_at) == (status, reason, run.ended_at)


def test_an_attempt_whose_lease_ran_out_while_it_lived_goes_on(url, reader):
    with Writer(url, lease=1.0) as slow:
        slow.begin_run(RunRecord("r", "train", 1.0))
        slow._engine.dispose()

        def interrupted() -> bool:
            with Writer(url) as other, other._engine.begin() as connection:
                connection.execute(update(writers).values(seen_at=time.time() - 100))
            with Writer(url):
                pass
            return reader.run("r").status == "failed"

        # Its lease may be renewed in between.
        until(interrupted)
        until(lambda: reader.run("r").status == "running")
        (one,) = reader.attempts("r")
        assert one.writer_id == slow.id
        slow.finish_run("r", "completed")
    assert reader.attempts("r")[0].status == "completed"


def test_a_run_of_another_program_is_running_until_it_says_otherwise(url):
    with Writer(url) as writer, Reader(url) as reader:
        writer.add_sync(RunRecord("r", "rollout", 7.0))
        state = run_state(reader, reader.run("r"))
        assert (state.status, state.seen_at) == ("running", 7.0)
        assert attempt_figures(reader, "r") == []
        writer.finish_run("r", "failed", 9.0, "no verifier")
        assert run_state(reader, reader.run("r")).text == "failed: no verifier"
