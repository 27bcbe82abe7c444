"""A real vLLM that was started without care: the checks say so, and no publish slips through."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from bridle.engine.vllm import Expectation, VllmControl, check_engine
from bridle.trainer.publish.swap import PublishError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.mark.sampled(0)
def test_a_careless_vllm_fails_the_checks_that_it_should(vllm_servers: Any) -> None:
    server = vllm_servers.use("careless")
    checks = check_engine(server.base_url, expect=Expectation(context=100_000))
    print(*(check.line for check in checks), sep="\n", file=sys.stderr)
    failed = {check.name for check in checks if check.outcome == "failed"}
    assert failed == {
        "context",
        "logprobs mode",
        "sampling defaults",
        "tool calls",
        "reasoning",
        "prefix cache",
        "weight reloads",
    }
    assert all(check.remedy for check in checks if check.outcome == "failed")


@pytest.mark.sampled(0)
def test_the_stale_output_layer_of_tied_embeddings_is_found_and_undone(
    publishing: Callable[[str], Any],
) -> None:
    policy = publishing("careless")
    with VllmControl(policy.server.base_url) as control:
        publisher = policy.publisher(control)
        assert policy.scored_gap(control) <= 1e-3
        policy.step(seed=1)
        with pytest.raises(PublishError, match="the engine serves version 0 again") as failed:
            publisher.publish(policy.model, 1)
        print(failed.value, file=sys.stderr)
        assert control.policy_version() == 0
