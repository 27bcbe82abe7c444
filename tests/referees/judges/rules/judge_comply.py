"""``llm-comply``: replies against the providers' published schemas and rules."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from typing import Any

import pytest
from llm_comply.tests import get_tests

PATHS = {"openai-chat": "/v1", "open-responses": "/v1", "anthropic": "/v1", "google-genai": ""}
EVERY = [(name, test.id) for name in PATHS for test in get_tests(name)]


@functools.cache
def results(form: str, url: str, model: str) -> dict[str, Any]:
    """Return the result of each test of a format."""
    where = ["--format", form, "-u", url + PATHS[form], "-k", "k", "-m", model, "--json"]
    command = [sys.executable, "-m", "llm_comply.cli", *where]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return {result["id"]: result for result in json.loads(ran.stdout)["results"]}


@pytest.mark.parametrize(("form", "test"), EVERY, ids=[f"{form}-{test}" for form, test in EVERY])
def test_comply(form: str, test: str, url: str, model: str) -> None:
    result = results(form, url, model)[test]
    assert result["status"] in ("passed", "failed"), result
    if result.get("errors"):
        pytest.fail("\n".join(result["errors"]), pytrace=False)
