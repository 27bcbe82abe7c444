"""The proxy that is judged. These files run in the environment of ``requirements.txt``."""

from __future__ import annotations

import os

import pytest

MODEL = "gpt-5-claude-4-gemini-3"
"""A name that judges take for a model that thinks."""


@pytest.fixture(scope="session")
def url() -> str:
    return os.environ["BRIDLE_REFEREES_URL"]


@pytest.fixture(scope="session")
def model() -> str:
    return MODEL
