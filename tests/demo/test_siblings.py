"""A demo's training with a share of siblings."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bridle.harnesses.adapters.python_agent import PythonAgent
from bridle.harnesses.fleet import LocalFleet
from bridle.harnesses.sandboxes.forked import ForkedProvider
from bridle.harnesses.tasks.task import Task
from bridle.harnesses.verifiers import Delivery, FunctionVerifier
from bridle.recipes.demo.course import Script
from bridle.recipes.demo.run import Demo
from bridle.recipes.demo.settings import DemoSettings
from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.run.rollouts import Rollouts
from bridle.store.reading.queries import Reader

AGENT = """
import json, os, sys, urllib.request

messages = [{"role": "user", "content": sys.argv[1]}]
for number in range(3):
    body = {"model": "policy", "max_tokens": 4, "messages": messages}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {
            "content-type": "application/json",
            "authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
        },
    )
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [message, {"role": "user", "content": f"And {number}?"}]
print(message["content"])
"""


def check(delivery: Delivery) -> float:
    return float(len(delivery.answer) % 2)


class ThreeCalls:
    """A course whose agent makes three calls."""

    harness = "three-calls"
    harness_version = None

    def __init__(self, script: Path) -> None:
        script.write_text(AGENT)
        self._script = script

    def tasks(self, split: str, count: int | None = None, seed: int = 0) -> Sequence[Task]:
        prompts = [f"Question {number}?" for number in range(4)]
        found = [Task(id=prompt, suite="three", split=split, prompt=prompt) for prompt in prompts]
        return found[:count]

    def agent(self, temperature: float) -> PythonAgent:
        return PythonAgent(self._script, without_tls=True)

    def session_settings(self, temperature: float) -> Mapping[str, Any]:
        return {}

    def rollouts(self, proxy_url: str, key: str | None) -> Rollouts:
        fleet = LocalFleet(ForkedProvider(confined=True), FunctionVerifier(check))
        return Rollouts(proxy_url, fleet, key=key)

    def first_corpus(self) -> Iterable[str]:
        return []

    def teacher(self, tasks: Sequence[Task], skill: float) -> Script:
        raise NotImplementedError


@pytest.mark.sampled(0)
def test_every_other_group_re_enters_an_earlier_session(tmp_path: Path) -> None:
    settings = dataclasses.replace(
        DemoSettings(),
        branch=0.5,
        branch_at="value",
        baseline="siblings",
        groups=2,
        group_size=3,
        max_steps=3,
        parallel=3,
    )
    demo = Demo(tmp_path / "run", settings, Console(stderr=True), ThreeCalls(tmp_path / "agent.py"))
    size = train_tokenizer(demo.places.warm, ["Which question? 0123456789"] * 4, vocab_size=320)
    shape = TinyShape(hidden=32, layers=1, heads=1, kv_heads=1, intermediate=64, context=512)
    make_policy(demo.places.warm, shape, vocab_size=size, seed=3)
    demo._stage("train", demo._train)
    run = demo._state.runs["train"]
    origins: dict[str, set[tuple[str | None, str | None]]] = defaultdict(set)
    with Reader(demo.places.store) as reader:
        for session in reader.sessions(run=run):
            group = (session.group_id or "").removeprefix(f"{run}.")
            origins[group].add((session.origin_session_id, session.origin_call_id))
    assert {"0", "2", "4"} <= {name for name, every in origins.items() if every == {(None, None)}}
    for name in ("3", "5"):
        ((session_id, call_id),) = origins[name]
        assert session_id is not None, "siblings re-enter one session"
        assert call_id is not None
