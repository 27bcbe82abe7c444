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

from bridle.engine.contract.tokenizer import Tokenizer
from bridle.engine.vllm import Expectation, check_engine
from bridle.trainer.policy.model import load_policy, score_sequence

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
        *("-p", "no:cacheprovider", "-p", "no:warnings"),
    ]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    print(run.stdout.splitlines()[-1], file=sys.stderr)
    assert run.returncode == 0, run.stdout[-20000:]


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

    def ask(**fields: Any) -> dict[str, Any]:
        body = {
            "model": "policy",
            "messages": question,
            "tools": [TOOL],
            "kv_transfer_params": {"prompt_token_ids": ids},
            "return_token_ids": True,
            "logprobs": True,
            **fields,
        }
        url = f"{server.base_url}/v1/chat/completions"
        reply: dict[str, Any] = httpx.post(url, json=body, timeout=60, trust_env=False).json()
        assert reply["prompt_token_ids"] == ids
        return dict(reply["choices"][0])

    for turn in range(8):
        # What the policy itself says here is held to the trainer's logprobs after the same ids …
        free = ask(max_tokens=8)
        with torch.no_grad():
            expected = score_sequence(model, np.asarray(ids + free["token_ids"])).numpy()
        found = [entry["logprob"] for entry in free["logprobs"]["content"]]
        assert np.abs(expected[len(ids) - 1 :] - found).mean() <= 1e-3
        # … and the conversation goes on with two calls that a grammar makes it write.
        markup = "\n".join(call(f"{key}{turn}") for key in "ab")
        forced = ask(max_tokens=300, structured_outputs={"choice": [markup]})
        calls = [each["function"] for each in forced["message"]["tool_calls"]]
        keys = [json.loads(each["arguments"])["key"] for each in calls]
        assert keys == [f"a{turn}", f"b{turn}"]
        assert tokenizer.decode(forced["token_ids"]) == markup + "<|im_end|>"
        results = "".join(f"\n<tool_response>\n{key}\n</tool_response>" for key in keys)
        tail = f"\n<|im_start|>user{results}<|im_end|>\n<|im_start|>assistant\n"
        ids = ids + forced["token_ids"] + tokenizer.encode(tail)


def test_under_a_grammar_logprobs_are_of_what_the_grammar_allows(vllm_servers: Any) -> None:
    """Not the policy's own, whatever the logprobs mode: one forced token has probability 1."""
    server = vllm_servers.use("policy")
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": "text"}],
        "structured_outputs": {"choice": ["zebra"]},
        "logprobs": True,
        "return_token_ids": True,
    }
    url = f"{server.base_url}/v1/chat/completions"
    reply = httpx.post(url, json=body, timeout=60, trust_env=False).json()
    ids = reply["prompt_token_ids"] + reply["choices"][0]["token_ids"]
    found = [entry["logprob"] for entry in reply["choices"][0]["logprobs"]["content"]]
    with torch.no_grad():
        model = load_policy(vllm_servers.model_dir("policy"))
        own = score_sequence(model, np.asarray(ids)).numpy()[-len(found) :]
    assert found[-1] == pytest.approx(0.0, abs=1e-3), "after the choice nothing but the end"
    assert np.abs(own - found).mean() > 1.0


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
