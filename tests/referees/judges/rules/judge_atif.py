"""``atif``: the models of the trajectory format, which every export of a session must meet."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from atif import Trajectory

EXPORTS = Path(os.environ["BRIDLE_REFEREES_INPUTS"]).read_text().splitlines()


@pytest.mark.parametrize("number", range(len(EXPORTS)))
def test_export(number: int) -> None:
    exported = json.loads(EXPORTS[number])
    read = Trajectory.model_validate(exported)
    assert read.model_dump(mode="json", exclude_none=True)["steps"]
