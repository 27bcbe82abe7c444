"""The scores of trained tokens, from the loss to the store and the pages."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient

from bridle.reconstruct.dataset import open_store
from bridle.reconstruct.exports.parquet import export_parquet
from bridle.reconstruct.exports.selection import Selection
from bridle.run.feed import BROKEN_HEADER, Answer, _told
from bridle.store.reading.accounts import trained_spans
from bridle.store.reading.damage import DamagedRows
from bridle.store.reading.queries import Reader
from bridle.viewer.app import viewer_app
from bridle.viewer.rendering import Source
from support.processes import bridle

pytestmark = pytest.mark.usefixtures("warm_start")


def in_sql(store: str, query: str) -> list[Any]:
    with closing(sqlite3.connect(store)) as connection:
        return connection.execute(query).fetchall()


def test_a_run_keeps_the_trainers_scores_of_what_it_trained(
    training_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    done = bridle(*training_arguments(), "--steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    store = str(tmp_path / "out" / "bridle.db")
    ((run,),) = in_sql(store, "SELECT id FROM runs WHERE kind = 'train'")
    trained = dict(
        in_sql(store, "SELECT step, sum(tokens) FROM token_fates WHERE fate='trained' GROUP BY 1")
    )
    assert trained
    measured = dict(
        in_sql(store, "SELECT step, value FROM metrics WHERE name = 'update/logprob_gap'")
    )
    entropies = dict(in_sql(store, "SELECT step, value FROM metrics WHERE name = 'update/entropy'"))
    gaps: dict[int, list[float]] = {}
    uncertainty: dict[int, list[float]] = {}
    with Reader(store) as reader:
        pages = TestClient(viewer_app(Source(reader, store)))
        for session in reader.sessions():
            for number, call in enumerate(reader.calls(session.id), start=1):
                scored = trained_spans(reader, [call.id])
                if not scored:
                    continue
                page = pages.get(f"/sessions/{session.id}/turns/{number}/tokens").text
                shown = json.loads(re.search(r'json">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
                (strip,) = shown["strips"]
                found = scored[call.id, 0]
                assert strip["scored"] == {
                    "run": run,
                    "step": found.step + 1,
                    "version": found.version,
                }
                (sampled,) = reader.sampled(call.id)
                is_trained = ~np.isnan(found.logprobs)
                gap = np.abs(sampled.logprobs[: len(found.logprobs)] - found.logprobs)[is_trained]
                gaps.setdefault(found.step, []).extend(gap.tolist())
                uncertainty.setdefault(found.step, []).extend(found.entropies[is_trained].tolist())
                places = np.flatnonzero(is_trained)
                assert [strip["tokens"][at][5] for at in places] == found.logprobs[places].tolist()
                assert [strip["tokens"][at][6] for at in places] == found.entropies[places].tolist()
    assert {step: len(each) for step, each in gaps.items()} == trained
    for step, each in gaps.items():
        # The loss of the step measured the same logprobs.
        assert np.mean(each) == pytest.approx(measured[step], rel=1e-3, abs=1e-9)
        assert np.mean(uncertainty[step]) == pytest.approx(entropies[step], rel=1e-4)

    assert_exported(store, tmp_path)


def assert_exported(store: str, folder: Path) -> None:
    """The scores are in tables, files and the feed, at the tokens that they are of."""
    with open_store(store) as opened:
        rows = opened.samples_table(facts=True).to_pylist()
        scored = trained_spans(opened.reader, {one for row in rows for one in row["call_ids"]})
        sessions = list(opened.reader.sessions())
        answer = _told(opened.reader, sessions, Answer("ndjson", "tree", facts=True), {})
    for row in rows:
        calls, replies = np.array(row["calls"]), zip(row["call_ids"], row["choices"], strict=True)
        for index, reply in enumerate(replies):
            for name, values in (
                ("trained_logprobs", scored[reply].logprobs),
                ("entropies", scored[reply].entropies),
            ):
                found = np.array(row[name], np.float32)[calls == index]
                assert np.array_equal(found[: len(values)], values, equal_nan=True)
                assert np.isnan(found[len(values) :]).all()
        assert np.isnan(np.array(row["entropies"])[calls < 0]).all()
    fed = [sample for line in answer.body.splitlines() for sample in json.loads(line)["samples"]]
    for name in ("trained_logprobs", "entropies"):
        plain = [[None if number != number else number for number in row[name]] for row in rows]
        assert [sample[name] for sample in fed] == plain
    file = folder / "tokens.parquet"
    with Reader(store) as reader:
        export_parquet(reader, file, Selection(facts=True))
    assert repr(pq.read_table(file).to_pylist()) == repr(rows)


def test_damaged_scores_are_named(
    training_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    done = bridle(*training_arguments(), "--steps", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    store = str(tmp_path / "out" / "bridle.db")
    with closing(sqlite3.connect(store)) as connection, connection:
        connection.execute(
            "UPDATE trained_spans SET entropies = x'07'"
            " WHERE call_id = (SELECT min(call_id) FROM trained_spans)"
        )
    with Reader(store) as reader:
        sessions = list(reader.sessions())
        answer = _told(reader, sessions, Answer("ndjson", "tree", facts=True), {})
        assert answer.headers[BROKEN_HEADER] == "1"
        assert len(answer.body.splitlines()) == len(sessions) - 1
        with pytest.raises(DamagedRows, match="column entropies"):
            export_parquet(reader, tmp_path / "tokens.parquet", Selection(facts=True))


@pytest.mark.sampled(0)
def test_a_run_may_keep_no_scores(
    training_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    off = ("--set", "training.token_scores=false")
    done = bridle(*training_arguments(), *off, "--steps", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    store = str(tmp_path / "out" / "bridle.db")
    assert in_sql(store, "SELECT count(*) FROM trained_spans") == [(0,)]
    assert in_sql(store, "SELECT count(*) > 0 FROM token_fates") == [(1,)]
