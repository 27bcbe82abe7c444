"""AIPerf's model of a trace, which every line of exported traffic must meet."""

from __future__ import annotations

import os
from pathlib import Path

from aiperf.dataset.loader.models import MooncakeTrace

LINES = Path(os.environ["BRIDLE_REFEREES_INPUTS"]).read_text().splitlines()


def test_export() -> None:
    read = [MooncakeTrace.model_validate_json(line) for line in LINES]
    assert all(line.messages and line.session_id for line in read)
    assert [line.timestamp for line in read]
