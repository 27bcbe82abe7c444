"""Recorded sessions to rebuild."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from bridle.store.call import CallBegun
from bridle.store.records import CallKind, Conversation, LineageState, RequestDigests, SessionRecord
from bridle.store.schema.database import migrate
from bridle.store.tree import TokenTree
from bridle.store.writing.writer import Writer


class Recording:
    """One session in the making; calls are numbered tokens, easy to tell apart."""

    def __init__(self, writer: Writer, calls: Any, **fields: Any) -> None:
        self.writer, self.calls = writer, calls
        self.session: SessionRecord = calls.session(**fields)
        self.tree = TokenTree(self.session.id)
        self.clock = 0.0
        self.tools: dict[str | None, Sequence[Any]] = {}
        """The tools of each call, by call id."""
        writer.add_sync(self.session)

    @property
    def id(self) -> str:
        return self.session.id

    def call(
        self,
        prompt: Sequence[int],
        *sampled: Sequence[int],
        parent: str | None = None,
        version: int = 1,
        finish: str = "stop",
        headers: Any = (),
        conversation: Mapping[str, Any] | None = None,
        replayed_call_id: str | None = None,
        message: Mapping[str, Any] = MappingProxyType({"content": "yes"}),
        **fields: Any,
    ) -> str:
        """Records a call that agrees with itself unless ``fields`` say otherwise; gives its id.

        ``conversation`` has chat messages: the ``tail`` of the request, its ``tools`` where they
        are not those of its base, the replies of further ``choices``, and ``lineage``. ``message``
        is the first reply.
        """
        self.clock += 1.0
        conversation = conversation or {}
        if "replies" not in fields:
            said = [message, *conversation.get("choices", ())] if message != {} else ()
            fields["replies"] = tuple(map(self.calls.message, said))
        begun: CallBegun = self.calls.begun(
            self.session,
            started_at=self.clock,
            request_body=repr(list(prompt)).encode(),
            parent_call_id=parent,
            headers=dict(headers),
            replayed_call_id=replayed_call_id,
            conversation=self._conversation(conversation),
        )
        if begun.conversation is not None:
            self.tools[begun.id] = begun.conversation.tools
        ended = self.calls.ended(
            begun,
            prompt,
            tree=self.tree,
            **{
                "choices": tuple(self.calls.choice(ids, version, finish) for ids in sampled),
                "usage": {
                    "prompt_tokens": len(prompt),
                    "completion_tokens": sum(len(ids) for ids in sampled),
                },
                "ended_at": self.clock + 0.5,
                "response_body": begun.id.encode(),
                "model_served": "policy",
                "kind": CallKind.MAIN,
                **fields,
            },
        )
        self.writer.begin_call(begun)
        self.writer.end_call_sync(ended)
        return begun.id

    def _conversation(self, asked: Mapping[str, Any]) -> Conversation | None:
        if "tail" not in asked:
            return None
        lineage, state = asked.get("lineage"), None
        if lineage is not None:
            state = LineageState(
                RequestDigests(
                    system=str(lineage.get("system")).encode(),
                    system_form=b"",
                    tools=str(lineage.get("tools")).encode(),
                    ask=str(lineage.get("ask")).encode(),
                    units=tuple(str(unit).encode() for unit in lineage.get("units", ())),
                    forms=(),
                    depth=1,
                    agent=lineage.get("agent"),
                ),
                lineage.get("base"),
                lineage.get("choice", 0),
                differs=lineage.get("differs", ()),
            )
        tools = asked.get("tools")
        if tools is None:
            tools = self.tools.get(None if state is None else state.base_call_id, ())
        tail = tuple(map(self.calls.message, asked["tail"]))
        length = len(tail) + 2 * (state is not None and state.base_call_id is not None)
        return Conversation(tail, tuple(tools), length, lineage=state)


@pytest.fixture
def url(tmp_path: Path) -> str:
    address = str(tmp_path / "bridle.db")
    migrate(address)
    return address


@pytest.fixture
def record(writer: Writer, calls: Any) -> Callable[..., Recording]:
    """``record(**session fields)`` starts a session."""
    return lambda **fields: Recording(writer, calls, **fields)


@pytest.fixture
def agent(record: Callable[..., Recording]) -> Recording:
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
