"""``bridle viewer`` opens a person's browser, and no program's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.processes import until


@pytest.mark.parametrize(
    ("asked", "opened"), [(["--browser"], True), ([], False), (["--no-browser"], False)]
)
def test_a_browser_is_opened_at_the_pages_if_it_is_asked_for_or_a_person_waits(
    store: str, tmp_path: Path, asked: list[str], opened: bool
) -> None:
    seen = tmp_path / "seen"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {seen}\n')
    browser.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-m", "bridle", "viewer", "--store", store, "--port", "0", *asked],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "BROWSER": f"{browser} %s", "DISPLAY": ":99"},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if opened:
            until(lambda: seen.is_file() and seen.read_text().strip() != "")
            assert seen.read_text().strip() in line
    finally:
        process.terminate()
        process.wait(30)
    assert seen.is_file() == opened
