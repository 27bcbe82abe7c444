"""New weights for a real vLLM with tied embeddings, which a plain reload on CPU gets wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_each_of_five_publishes_is_what_the_engine_samples_from(
    publishing: Callable[[str], Any],
) -> None:
    policy = publishing("tied")
    assert policy.model.config.tie_word_embeddings
    policy.publish_five()
