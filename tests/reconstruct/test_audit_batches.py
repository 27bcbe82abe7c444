"""The audit in batches: the same result in one process and in several."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridle.bench.gallery import fill
from bridle.reconstruct import audit_batches
from bridle.reconstruct.audit import audit
from bridle.reconstruct.audit_batches import BatchedAudit
from bridle.store.reading.queries import Reader


@pytest.mark.sampled(0)
def test_several_processes_find_what_one_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = str(tmp_path / "store.db")
    made = fill(store, 10, turns=2)
    monkeypatch.setattr(audit_batches, "BATCH", 3)
    with Reader(store) as reader:
        whole = list(audit(reader))
        for run in (None, "run_gallery1"):
            batched = BatchedAudit(reader, run)
            ids = batched.session_ids()
            wanted = [one for one in whole if one.session_id in ids]
            assert list(batched.results(ids, 1)) == wanted
            assert list(batched.results(ids, 2)) == wanted
        assert BatchedAudit(reader).session_ids() == made
