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
import pytest
from fastapi.testclient import TestClient

from bridle.store.reading.accounts import trained_spans
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
                scored = trained_spans(reader, call.id)
                if not scored:
                    continue
                page = pages.get(f"/sessions/{session.id}/turns/{number}/tokens").text
                shown = json.loads(re.search(r'json">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
                (strip,) = shown["strips"]
                found = scored[0]
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


def test_a_run_may_keep_no_scores(
    training_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    off = ("--set", "training.token_scores=false")
    done = bridle(*training_arguments(), *off, "--steps", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    store = str(tmp_path / "out" / "bridle.db")
    assert in_sql(store, "SELECT count(*) FROM trained_spans") == [(0,)]
    assert in_sql(store, "SELECT count(*) > 0 FROM token_fates") == [(1,)]
