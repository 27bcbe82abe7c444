"""Engine replies made up at random, with and without contradictions.

Each call is complete and agrees with the engine, or its record names what was wrong.

The whole proxy runs, but for sockets: a transport hands its bytes to the engine's follower.
"""

from __future__ import annotations

import asyncio
import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridle.proxy.settings import Limits, ProxySettings
from bridle.store.records import CallStatus
from support.theatre import Received, Sent, Theatre

pytestmark = pytest.mark.loop

MADE = runpy.run_path(str(Path(__file__).with_name("made_replies.py")))
Plan, VOCABULARY = MADE["Plan"], MADE["VOCABULARY"]
AT_ONCE = 10
"""Replies of one example, which are served beside each other."""
CI, LONG = 2_000, 100_000


def asked(dialect: str, name: str) -> tuple[str, dict[str, Any]]:
    """The path and the fields of a request that has ``name`` in its prompt."""
    message = {"role": "user", "content": name}
    return {
        "chat": ("/v1/chat/completions", {"messages": [message]}),
        "completions": ("/v1/completions", {"prompt": name}),
        "responses": ("/v1/responses", {"input": name}),
        "messages": ("/v1/messages", {"messages": [message], "max_tokens": 9}),
    }[dialect]


class PlannedReplies(Theatre):
    """A proxy whose engine replies by plans, with a tokenizer of a vocabulary of its own."""

    def __init__(self, directory: Path, model_dir: Path) -> None:
        config = directory / "model"
        config.mkdir()
        for file in model_dir.iterdir():
            (config / file.name).write_bytes(file.read_bytes())
        (config / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
        limits = Limits(health_check_s=0, failures_to_eject=10**9, retries=0)
        store = f"sqlite:///{directory}/bridle.db"
        super().__init__(
            ProxySettings("http://engine", store, model="m", limits=limits, tokenizer_dir=config)
        )

    def play(self, plans: list[Any]) -> list[Received]:
        async def together() -> list[Received]:
            return await asyncio.gather(*map(self._ask, plans))

        return self.runner.run(together())

    async def _ask(self, plan: Any) -> Received:
        name = self.name(Sent(plan.reply(), cut="cut" in plan.defects))
        path, fields = asked(plan.dialect, name)
        body = {"model": "m", "stream": plan.stream, **fields}
        if plan.dialect in ("chat", "completions"):
            body |= {"n": plan.asked}
        return await self.post(name, path, body)


@pytest.fixture(scope="module")
def theatre(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[PlannedReplies]:
    found = PlannedReplies(tmp_path_factory.mktemp("replies"), model_dir)
    yield found
    found.close()


def logprobs(said: list[float | None]) -> Any:
    """Return the logprobs as they are recorded: NaN where the engine gave none."""
    return np.array([np.nan if one in (None, -9999.0) else one for one in said], np.float32)


def judged(theatre: PlannedReplies, plan: Any, status: int, body: bytes, call_id: str) -> None:
    """The rule that each reply is held to."""
    assert status in (200, 502), (status, body)
    assert b"Traceback" not in body
    assert b"the proxy failed" not in body
    row = theatre.reader.call(call_id)
    sampled = theatre.reader.sampled(call_id)
    if not plan.contradictory:
        assert (status, row.status) == (200, CallStatus.COMPLETE), (row.reason, row.notes)
        prompt = theatre.reader.prompt_token_ids(call_id)
        assert prompt is not None
        assert prompt.tolist() == plan.prompt
        assert len(sampled) == len(plan.choices)
        for choice, said in zip(sampled, plan.choices, strict=True):
            assert choice.token_ids.tolist() == said.ids
            assert np.array_equal(choice.logprobs, logprobs(said.logprobs), equal_nan=True)
            assert choice.finish_reason == said.finish
        assert [reply.content for reply in row.replies] == [
            "".join(said.texts) for said in plan.choices
        ]
        return
    if row.prompt_tokens is None and not row.sampled_tokens:
        return  # an engine that gives no ids: there is nothing to contradict, nor to train
    assert row.status is not CallStatus.COMPLETE, plan.defects
    assert row.reason, plan.defects
    if row.status is CallStatus.PARTIAL:  # what came before the end is as the engine said it
        for choice, said in zip(sampled, plan.choices, strict=False):
            assert choice.token_ids.tolist() == said.ids[: len(choice.token_ids)]
            scores = logprobs(said.logprobs[: len(choice.logprobs)])
            assert np.array_equal(choice.logprobs, scores, equal_nan=True)
        assert row.reason == "upstream_error"


SEEDS = st.integers(0, 2**48)
DEFECTS = st.one_of(
    st.just(frozenset()),
    st.frozensets(st.sampled_from(MADE["HARMLESS"] + MADE["MISSING"]), max_size=3),
    st.frozensets(
        st.sampled_from(MADE["HARMLESS"] + MADE["MISSING"] + MADE["CONTRADICTIONS"]), max_size=3
    ),
)
REPLIES = st.lists(st.tuples(SEEDS, DEFECTS), min_size=AT_ONCE, max_size=AT_ONCE)
SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)


def check(theatre: PlannedReplies, replies: list[tuple[int, frozenset[str]]]) -> None:
    plans = [Plan.made(seed, defects) for seed, defects in replies]
    for plan, answer in zip(plans, theatre.play(plans), strict=True):
        judged(theatre, plan, *answer)


@pytest.mark.timeout(600)
@settings(max_examples=CI // AT_ONCE, database=None, derandomize=True, suppress_health_check=SLOW)
@given(replies=REPLIES)
def test_a_reply_is_complete_and_consistent_or_named(
    theatre: PlannedReplies, replies: list[tuple[int, frozenset[str]]]
) -> None:
    check(theatre, replies)


@pytest.mark.long
@pytest.mark.timeout(7200)
@settings(max_examples=LONG // AT_ONCE, database=None, suppress_health_check=SLOW)
@given(replies=REPLIES)
def test_a_hundred_thousand_replies_are_complete_and_consistent_or_named(
    theatre: PlannedReplies, replies: list[tuple[int, frozenset[str]]]
) -> None:
    check(theatre, replies)
