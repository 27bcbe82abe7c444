"""``make_policy.py`` as a program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("make_policy.py")


def test_asking_for_help_makes_no_policy(tmp_path: Path) -> None:
    told = subprocess.run([sys.executable, PROGRAM, "--help"], cwd=tmp_path, capture_output=True)
    assert told.returncode == 0
    assert b"directory" in told.stdout
    assert not list(tmp_path.iterdir())
