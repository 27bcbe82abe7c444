"""The cost of reading a session, and of each page of it, grows with its calls and no faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from bridle.diagnosis.findings import findings_of_session
from bridle.diagnosis.transcript import turns_of
from bridle.proxy.continuation.prompt import CallPrompt
from bridle.proxy.dialects.chat.request import parse_on
from bridle.proxy.recording.recorder import Recording, begun_call
from bridle.proxy.session.loading import load_calls
from bridle.proxy.session.session import Session
from bridle.proxy.wire.canonical import Finished, Started, TextDelta, Tokens, Usage
from bridle.proxy.wire.histories import Known
from bridle.reconstruct.audit import audit
from bridle.reconstruct.exports.formats import export
from bridle.reconstruct.samples.builders import build
from bridle.reconstruct.samples.rules import SampleRules
from bridle.reconstruct.session import LoadedSession
from bridle.store.call import EndedFacts
from bridle.store.reading.queries import Reader
from bridle.store.records import CallStatus, SessionRecord, new_id
from bridle.store.schema.database import migrate
from bridle.store.writing.writer import Writer

Work = Callable[[], object]
_OUTCOME = EndedFacts(status=CallStatus.COMPLETE, sampling={"temperature": 1.0}, model_served="m")


class Agent:
    """A client of one session, whose every call asks for a word more."""

    def __init__(self) -> None:
        record = SessionRecord(id=new_id("ses"), created_at=time.time(), name=new_id("talk"))
        self.session = Session(record)
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "go " * 20}]
        self.prompt = np.arange(20, dtype=np.uint32)

    def body(self) -> bytes:
        return orjson.dumps({"model": "m", "messages": self.messages})

    def call(self, writer: Writer | None = None) -> None:
        body = self.body()
        request, history, _ = parse_on(body, {}, {}, Known(self.session.trails.histories()))
        link = self.session.find(request, None, history)
        begun = begun_call(self.session.id, request, body, {}, time.time(), link)
        recording = Recording(begun, self.session, request, link, CallPrompt(self.prompt))
        ids = np.arange(8, dtype=np.uint32) + len(self.messages)
        recording.fold.take([
            Started(len(self.prompt), self.prompt),
            Tokens(ids.tolist(), [-0.5] * 8),
            TextDelta(f"word {len(self.messages)}"),
            Finished("stop"),
            Usage(len(self.prompt), 8),
        ])  # fmt: skip
        recording.sent(b"{}")
        ended, turn = recording.ended(_OUTCOME)
        self.session.add(turn)
        if writer is not None:
            writer.begin_call(begun)
            writer.end_call_sync(ended)
        reply = {"role": "assistant", "content": f"word {len(self.messages)}"}
        self.messages += [reply, {"role": "user", "content": f"on {len(self.messages)} " * 10}]
        self.prompt = np.concatenate([self.prompt, ids, np.full(12, 7, dtype=np.uint32)])


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], tuple[Any, str]]]:
    """Return a reader of a store, and the id of its only session, of so many calls."""
    readers: list[Reader] = []

    @cache
    def store(calls: int) -> tuple[Reader, str]:
        url = f"sqlite:///{tmp_path_factory.mktemp('store')}/{calls}.db"
        migrate(url)
        agent = Agent()
        with Writer(url) as writer:
            writer.add_sync(agent.session.record)
            for _ in range(calls):
                agent.call(writer)
        readers.append(Reader(url))
        return readers[-1], agent.session.id

    yield store
    for reader in readers:
        reader.close()


def _loaded(reader: Reader, session_id: str) -> None:
    session = Session(reader.session(session_id))
    load_calls(session, reader.calls(session_id), reader.spans(session_id))


READ: dict[str, Callable[[Reader, str, Path], object]] = {
    "a session that goes on after a restart": lambda reader, one, _: _loaded(reader, one),
    "the transcript": lambda reader, one, _: turns_of(LoadedSession.load(reader, one)),
    "findings": lambda reader, one, _: findings_of_session(reader, one),
    "samples": lambda reader, one, _: build(LoadedSession.load(reader, one), SampleRules()),
    "the audit": lambda reader, one, _: list(audit(reader, SampleRules())),
    "an export of messages": lambda reader, _, path: export(reader, path / "x.jsonl", "chat"),
    "an export of tokens": lambda reader, _, path: export(reader, path / "x.jsonl", "tokens"),
}


@pytest.mark.parametrize("name", READ)
def test_a_session_of_many_calls(is_linear, stored, tmp_path, name):
    def read(n: int) -> Work:
        reader, session_id = stored(n)
        return lambda: READ[name](reader, session_id, tmp_path)

    is_linear(read, 64)


def test_a_call_that_goes_on_costs_by_what_is_new(cpu_s):
    agent = Agent()
    for _ in range(700):
        agent.call()
    body = agent.body()
    whole = min(
        cpu_s(lambda: Agent().session.find(parse_on(body, {}, {}, Known())[0])) for _ in range(5)
    )

    def go_on() -> None:
        request, history, _ = parse_on(body, {}, {}, Known(agent.session.trails.histories()))
        agent.session.find(request, None, history)

    assert min(cpu_s(go_on) for _ in range(5)) < whole / 5
