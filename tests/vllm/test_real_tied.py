"""New weights for a real vLLM with tied embeddings, which a plain reload on CPU gets wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_the_command_serves_it_after_every_check(vllm_servers: Any) -> None:
    server = vllm_servers.use("tied")
    assert server.complaints.strip() == ""
    adopted = subprocess.run(
        [sys.executable, "-m", "bridle", "engine", "vllm", "--url", server.base_url],
        capture_output=True,
        text=True,
    )
    print(adopted.stdout, file=sys.stderr)
    assert adopted.returncode == 0, adopted.stdout
    assert adopted.stdout.count("ok      ") == adopted.stdout.count("\n") == 14


def test_each_of_five_publishes_is_what_the_engine_samples_from(
    publishing: Callable[[str], Any],
) -> None:
    policy = publishing("tied")
    assert policy.model.config.tie_word_embeddings
    policy.publish_five()


def test_each_of_three_transfers_is_what_the_engine_samples_from(
    publishing: Callable[[str], Any],
) -> None:
    publishing("tied").transfer_three()
