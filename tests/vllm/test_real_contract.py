"""A real vLLM and the contract: the conformance suite unchanged, the checks, exact continuation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from engine.tokenizer import Tokenizer
from engine.vllm import Expectation, check_engine
from trainer.model import load_policy, score_sequence

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


def call(key: str) -> str:
    return f'<tool_call>\n{{"name": "lookup", "arguments": {{"key": "{key}"}}}}\n</tool_call>'


TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}


def test_the_conformance_suite_passes_unchanged(vllm_servers: Any) -> None:
    server = vllm_servers.use("policy")
    arguments = [
        "tests/conformance",
        "--engine-url",
        server.base_url,
        "--tb=short",
        "-p",
        "no:cacheprovider",
    ]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    print(run.stdout[-4000:], file=sys.stderr)
    assert run.returncode == 0, run.stdout[-8000:]


def test_a_launched_vllm_passes_every_check(vllm_servers: Any) -> None:
    server = vllm_servers.use("policy")
    checks = check_engine(server.base_url, expect=Expectation(context=1024))
    print(*(check.line for check in checks), sep="\n", file=sys.stderr)
    assert {check.outcome for check in checks} == {"ok"}


def test_exact_continuation_holds_over_eight_turns_of_parallel_tools(vllm_servers: Any) -> None:
    server = vllm_servers.use("policy")
    model_dir = vllm_servers.model_dir("policy")
    tokenizer, model = Tokenizer(model_dir), load_policy(model_dir)
    question = [{"role": "user", "content": "calls"}]
    ids = tokenizer.encode(tokenizer.render(question, [TOOL]))
    with httpx.Client(base_url=server.base_url, timeout=60, trust_env=False) as http:
        for turn in range(8):
            markup = "\n".join(call(f"{key}{turn}") for key in "ab")
            body = {
                "model": "policy",
                "messages": question,
                "tools": [TOOL],
                "structured_outputs": {"choice": [markup]},
                "kv_transfer_params": {"prompt_token_ids": ids},
                "return_token_ids": True,
                "logprobs": True,
                "max_tokens": 300,
                "temperature": 1.0,
            }
            whole = http.post("/v1/chat/completions", json=body).json()
            assert whole["prompt_token_ids"] == ids
            choice = whole["choices"][0]
            calls = [call["function"] for call in choice["message"]["tool_calls"]]
            assert [json.loads(call["arguments"])["key"] for call in calls] == [
                f"a{turn}",
                f"b{turn}",
            ]
            sampled = choice["token_ids"]
            assert tokenizer.decode(sampled) == markup + "<|im_end|>"
            with torch.no_grad():
                expected = score_sequence(model, np.asarray(ids + sampled)).numpy()
            found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            assert np.abs(expected[len(ids) - 1 :] - found).mean() <= 1e-3
            results = "".join(f"\n<tool_response>\n{key}{turn}\n</tool_response>" for key in "ab")
            tail = f"\n<|im_start|>user{results}<|im_end|>\n<|im_start|>assistant\n"
            ids = ids + sampled + tokenizer.encode(tail)


def test_reasoning_that_a_policy_opens_itself_is_split_off_whole_and_streamed(
    vllm_servers: Any,
) -> None:
    server = vllm_servers.use("policy")
    body: dict[str, Any] = {
        "model": "policy",
        "messages": [{"role": "user", "content": "think"}],
        "temperature": 0.0,
    }
    url = f"{server.base_url}/v1/chat/completions"
    message = httpx.post(url, json=body, trust_env=False).json()["choices"][0]["message"]
    assert message["reasoning"].strip() == "An easy one."
    assert message["content"].strip() == "Done."
    reasoning = content = ""
    with httpx.stream("POST", url, json=body | {"stream": True}, trust_env=False) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
                reasoning += delta.get("reasoning") or ""
                content += delta.get("content") or ""
    assert (reasoning, content) == (message["reasoning"], message["content"])


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
