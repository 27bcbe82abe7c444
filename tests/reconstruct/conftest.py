"""Recorded sessions to rebuild."""

from __future__ import annotations

import time

import numpy as np
import pytest

from store.database import migrate
from store.queries import Reader
from store.records import (
    CallBegun,
    CallEnded,
    CallKind,
    CallStatus,
    Choice,
    SessionRecord,
    VersionRun,
    new_id,
)
from store.writer import Writer


class Recording:
    """One session in the making; calls are numbered tokens, easy to tell apart."""

    def __init__(self, writer: Writer, **fields) -> None:
        self.writer = writer
        self.random = np.random.default_rng(7)
        self.session = SessionRecord(
            **{"id": new_id("session"), "created_at": time.time(), **fields}
        )
        self.clock = 0.0
        writer.create_session_sync(self.session)

    @property
    def id(self) -> str:
        return self.session.id

    def call(
        self, prompt, *sampled, parent=None, version=1, finish="stop", headers=(), **fields
    ) -> str:
        """Records a call that agrees with itself unless ``fields`` say otherwise; gives its id."""
        self.clock += 1.0
        begun = CallBegun(
            id=new_id("call"),
            session_id=self.id,
            dialect="chat",
            started_at=self.clock,
            request_body=repr(list(prompt)).encode(),
            stream=True,
            model_requested="policy",
            parent_call_id=parent,
            headers=dict(headers),
        )
        choices = tuple(
            Choice(
                np.asarray(ids, dtype=np.uint32),
                -self.random.random(len(ids)).astype(np.float32),
                (VersionRun(0, version),) if len(ids) else (),
                finish,
            )
            for ids in sampled
        )
        values = {
            "status": CallStatus.COMPLETE,
            "ended_at": self.clock + 0.5,
            "prompt_token_ids": np.asarray(prompt, dtype=np.uint32),
            "choices": choices,
            "response_body": begun.id.encode(),
            "model_served": "policy",
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": sum(len(ids) for ids in sampled),
            },
            "message": {"role": "assistant", "content": "yes"},
            "kind": CallKind.MAIN,
        }
        self.writer.begin_call(begun)
        self.writer.end_call_sync(CallEnded(id=begun.id, session_id=self.id, **values | fields))
        return begun.id


@pytest.fixture
def url(tmp_path):
    address = str(tmp_path / "bridle.db")
    migrate(address)
    return address


@pytest.fixture
def writer(url):
    with Writer(url) as opened:
        yield opened


@pytest.fixture
def reader(url):
    with Reader(url) as opened:
        yield opened


@pytest.fixture
def record(writer):
    """``record(**session fields)`` starts a session."""
    return lambda **fields: Recording(writer, **fields)


@pytest.fixture
def agent(record):
    """A session as agents make them: turns, a sub-agent, a title, a retry and a compaction."""
    session = record()
    system = [1, 2, 3]
    first = session.call([*system, 10], [50, 51], version=1)
    session.call([4, 5, 10], [90], kind=CallKind.SIDE, role="title")
    second = session.call([*system, 10, 50, 51, 20], [52, 53, 54], parent=first, version=1)
    sub = session.call([6, 7, 60], [70, 71], kind=CallKind.SUBAGENT, role="search", version=2)
    session.call([6, 7, 60, 70, 71, 61], [72], parent=sub, kind=CallKind.SUBAGENT, version=2)
    third = session.call(
        [*system, 10, 50, 51, 20, 52, 53, 54, 30], [55], parent=second, version=2, finish="length"
    )
    session.call([*system, 10, 50, 51, 20, 52, 53, 54, 30], [56, 57], parent=second, version=2)
    session.call([*system, 10, 50, 51, 20, 52, 99], [58], parent=second, version=3)
    session.call([8, 10, 20], [59], parent=third, version=3)
    return session
