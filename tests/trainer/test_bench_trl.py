"""``bridle bench train --trl``: TRL's own trainers take the bench's samples."""

from __future__ import annotations

import pytest

from bridle.bench import train
from bridle.bench.train import TrainSettings


@pytest.mark.long
def test_trl_trains_the_same_samples_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from bridle.bench.train_trl import bench_trl

    monkeypatch.setattr(train, "ENOUGH_S", 0.0)
    small = TrainSettings(turns=5, question=20, thinking=6, answer=4, result=8, max_tokens=512)
    found = bench_trl(small)
    assert found.step_speedup == pytest.approx(found.rows_seconds / found.seconds)
    assert found.trees_step_speedup == pytest.approx(found.trees_seconds / found.seconds)
