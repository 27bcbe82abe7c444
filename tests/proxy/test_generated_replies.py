"""Engine replies made up at random, with and without contradictions: each call is complete and says
what the engine said, or its record names what was wrong.

The whole proxy runs, but for sockets: a transport hands its bytes to the engine's follower.
"""

from __future__ import annotations

import asyncio
import json
import re
import runpy
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridle.proxy.app import App
from bridle.proxy.engines.transport import Answer, ConnectionBroke, Follower
from bridle.proxy.settings import Limits, ProxySettings
from bridle.store.reading.queries import Reader
from bridle.store.records import CallStatus

pytestmark = pytest.mark.loop

MADE = runpy.run_path(str(Path(__file__).with_name("made_replies.py")))
Plan, VOCABULARY = MADE["Plan"], MADE["VOCABULARY"]
AT_ONCE = 10
"""Replies of one example, which are served beside each other."""
CI, LONG = 2_000, 100_000
NAME = re.compile(rb"[0-9a-f]{32}")


def asked(dialect: str, name: str) -> tuple[str, dict[str, Any]]:
    """The path and the fields of a request that has ``name`` in its prompt."""
    message = {"role": "user", "content": name}
    return {
        "chat": ("/v1/chat/completions", {"messages": [message]}),
        "completions": ("/v1/completions", {"prompt": name}),
        "responses": ("/v1/responses", {"input": name}),
        "messages": ("/v1/messages", {"messages": [message], "max_tokens": 9}),
    }[dialect]


class Response:
    """A plan's reply, read by read."""

    status = 200

    def __init__(self, plan: Any) -> None:
        self.headers: dict[str, str] = {}
        self._plan = plan
        self._left = False

    async def read(self) -> bytes:
        answer = Answer()
        await self.follow(answer.take)
        return answer.body

    async def follow(self, follower: Follower) -> None:
        for piece in self._plan.reply():
            await asyncio.sleep(0)
            if self._left:
                return
            if (waiting := follower(piece)) is not None:
                await waiting
        if "cut" in self._plan.defects and not self._left:
            raise ConnectionBroke("the engine ended the connection")

    def close(self) -> None:
        pass

    def leave(self) -> None:
        self._left = True


class Transport:
    """Replies to each request with the plan that its prompt names."""

    connection_epoch = 0
    any_open = True

    def __init__(self) -> None:
        self.plans: dict[str, Any] = {}

    async def request(self, method: str, path: str, body: bytes = b"", **_: Any) -> Response:
        del method, path
        found = NAME.search(body)
        assert found
        return Response(self.plans.pop(found[0].decode()))

    async def close(self) -> None:
        pass


class Theatre:
    """The proxy's application in a loop of its own."""

    def __init__(self, directory: Path, model_dir: Path) -> None:
        store = f"sqlite:///{directory}/bridle.db"
        config = directory / "model"
        config.mkdir()
        for file in model_dir.iterdir():
            (config / file.name).write_bytes(file.read_bytes())
        (config / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
        limits = Limits(health_check_s=0, failures_to_eject=10**9, retries=0)
        self.app = App(
            ProxySettings("http://engine", store, model="m", limits=limits, tokenizer_dir=config)
        )
        self.transport = Transport()
        self.runner = asyncio.Runner()
        self._stop = asyncio.Event()
        self.runner.run(self._start())
        self.reader = Reader(store)

    async def _start(self) -> None:
        started, self._stop = asyncio.Event(), asyncio.Event()

        async def receive() -> dict[str, str]:
            if not started.is_set():
                return {"type": "lifespan.startup"}
            await self._stop.wait()
            return {"type": "lifespan.shutdown"}

        async def send(message: Any) -> None:
            assert "failed" not in message["type"], message
            started.set()

        self._life = asyncio.create_task(self.app({"type": "lifespan"}, receive, send))
        await started.wait()
        assert self.app.services
        (engine,) = self.app.services.engines._engines.values()
        engine.endpoint.transport = self.transport  # type: ignore[assignment]

    def close(self) -> None:
        async def stop() -> None:
            self._stop.set()
            await self._life

        self.runner.run(stop())
        self.runner.close()
        self.reader.close()

    def play(self, plans: list[Any]) -> list[tuple[int, bytes, str]]:
        async def together() -> list[tuple[int, bytes, str]]:
            return await asyncio.gather(*map(self._ask, plans))

        return self.runner.run(together())

    async def _ask(self, plan: Any) -> tuple[int, bytes, str]:
        """Status, body, and the call's id."""
        name = uuid.uuid4().hex
        self.transport.plans[name] = plan
        path, fields = asked(plan.dialect, name)
        body = {"model": "m", "stream": plan.stream, **fields}
        if plan.dialect in ("chat", "completions"):
            body |= {"n": plan.asked}
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]
        sent: list[Any] = []

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": f"/s/{name}{path}",
            "query_string": b"",
            "headers": [(b"host", b"localhost")],
            "client": ("127.0.0.1", 1),
        }
        await self.app(scope, receive, send)
        headers = dict(sent[0]["headers"])
        text = b"".join(message.get("body", b"") for message in sent)
        return sent[0]["status"], text, headers[b"x-request-id"].decode()


@pytest.fixture(scope="module")
def theatre(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Theatre]:
    found = Theatre(tmp_path_factory.mktemp("replies"), model_dir)
    yield found
    found.close()


def logprobs(said: list[float | None]) -> Any:
    """As they are recorded: NaN where the engine gave none."""
    return np.array([np.nan if one in (None, -9999.0) else one for one in said], np.float32)


def judged(theatre: Theatre, plan: Any, status: int, body: bytes, call_id: str) -> None:
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


def check(theatre: Theatre, replies: list[tuple[int, frozenset[str]]]) -> None:
    plans = [Plan.made(seed, defects) for seed, defects in replies]
    for plan, answer in zip(plans, theatre.play(plans), strict=True):
        judged(theatre, plan, *answer)


@pytest.mark.timeout(600)
@settings(max_examples=CI // AT_ONCE, database=None, derandomize=True, suppress_health_check=SLOW)
@given(replies=REPLIES)
def test_a_reply_is_complete_and_consistent_or_named(
    theatre: Theatre, replies: list[tuple[int, frozenset[str]]]
) -> None:
    check(theatre, replies)


@pytest.mark.long
@pytest.mark.timeout(7200)
@settings(max_examples=LONG // AT_ONCE, database=None, suppress_health_check=SLOW)
@given(replies=REPLIES)
def test_a_hundred_thousand_replies_are_complete_and_consistent_or_named(
    theatre: Theatre, replies: list[tuple[int, frozenset[str]]]
) -> None:
    check(theatre, replies)
