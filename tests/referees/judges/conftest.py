"""The proxy that is judged. These files run in the environment of ``requirements.txt``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

MODEL = "gpt-5-claude-4-gemini-3"
"""A name that judges take for a model that thinks."""


@pytest.fixture(scope="session")
def url() -> str:
    return os.environ["BRIDLE_REFEREES_URL"]


@pytest.fixture(scope="session")
def model() -> str:
    return MODEL


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write each test's name and the text of its failure, which is empty if it passed."""
    if report.when == "call" or not report.passed:
        _write(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(report)


def _write(report: pytest.TestReport | pytest.CollectReport) -> None:
    crash = getattr(report.longrepr, "reprcrash", None)
    failure = "" if report.passed else (crash.message if crash else str(report.longrepr))
    with Path(os.environ["BRIDLE_REFEREES_REPORT"]).open("a") as file:
        file.write(json.dumps([report.nodeid.rpartition("::")[2], failure]) + "\n")
