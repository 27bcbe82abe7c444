"""New weights for a real vLLM with tied embeddings, which a plain reload on CPU gets wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from bridle.engine.contract.client import EngineRefused
from bridle.engine.vllm import VllmLora

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


@pytest.mark.sampled(0)
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


@pytest.mark.sampled(0)
def test_without_adapters_it_says_how_to_start_it_with_them(vllm_servers: Any) -> None:
    with (
        VllmLora(vllm_servers.use("tied").base_url) as engine,
        pytest.raises(
            EngineRefused, match=r"serves no LoRA adapters.*--set lora_rank=20.*rank 32 "
        ),
    ):
        engine.require_lora(20)
