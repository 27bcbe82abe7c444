"""One session in memory: its record, its turns, its token tree, and what its next call reuses.

Everything here can be read again from the store. A call's way through it::

    link = session.find(request, agent)                # before the engine is asked
    …
    growth, _ = session.grow(call_id, link, choices, prompt_token_ids)  # when the call is over
    turn = session.turn(call_id, link, status, messages, growth, len(prompt_token_ids))
    session.add(turn)                                  # when it is in the store
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from msgspec import structs

from bridle.proxy.session.search import Search
from bridle.proxy.session.trails import Trails
from bridle.proxy.session.turn import Ending, Link, Sampled, Turn, TurnIndex, ending_text
from bridle.proxy.wire.canonical import Message, Request, prefilled
from bridle.proxy.wire.cut_ids import KnownPrompt
from bridle.proxy.wire.histories import History
from bridle.store.records import (
    CallStatus,
    Choice,
    Growth,
    RoutedExperts,
    SessionRecord,
    TokenIds,
    token_array,
)
from bridle.store.tree import Point, TokenTree, path_nodes

_SESSION_BYTES: Final = 4000
_TURN_BYTES: Final = 3000
_NODE_BYTES: Final = 500
"""Approximate bytes of a session, a turn and a span, without their token ids."""


class Session:
    """A session in memory; the module shows the order of the methods."""

    __slots__ = (
        "_began",
        "calls",
        "homes",
        "id",
        "loaded",
        "prompt",
        "record",
        "running",
        "size",
        "trails",
        "tree",
        "turns",
    )

    def __init__(
        self, record: SessionRecord, trails: Trails | None = None, *, loaded: bool = True
    ) -> None:
        """Create the session. ``trails`` are those of an index of turns that sessions share."""
        self.record = record
        self.id: str = record.id
        self.trails = Trails(TurnIndex()) if trails is None else trails
        """The latest requests, for those that go on from them."""
        self.turns = self.trails.index
        self.tree = TokenTree(record.id)
        self.calls: set[str] = set()
        """Ids of its calls that are over and have been processed."""
        self.running: set[str] = set()
        """Ids of its calls that are at the engine."""
        self.prompt = KnownPrompt()
        """The session's latest long prompt as the engine reported it."""
        self.homes: dict[Any, Any] = {}
        """The engine that the session stays with, by pool of engines."""
        self.loaded = loaded
        """True if the session's calls in the store have been read."""
        self.size = 0
        """Bytes held, when last measured."""
        self._began = time.monotonic() - (time.time() - record.created_at)

    def age(self) -> float:
        """Return the seconds since its creation. The clock may be set while it is in memory."""
        return time.monotonic() - self._began

    def measure(self) -> int:
        """Update ``size``, the approximate number of bytes held, and return its growth."""
        tree = self.tree
        size = _SESSION_BYTES + 4 * tree.tokens + _NODE_BYTES * len(tree.nodes) + self.prompt.size
        size += _TURN_BYTES * len(self.calls)
        if not self.turns.unrelated:
            size += self.trails.size
        grown, self.size = size - self.size, size
        return grown

    def find(
        self, request: Request, agent: str | None = None, history: History | None = None
    ) -> Link:
        """Return the place of ``request`` in the session, found by its messages or by its tokens.

        ``agent`` is the harness's own name of the (sub-)agent, if its headers have one. ``history``
        is the body that the messages were read from. The session's calls are not changed.
        """
        link = Search(self.turns, request, agent, self.trails, history).link()
        if link.parent is None and isinstance(request.prompt, tuple):
            return self.find_tokens(link, token_array(request.prompt))
        return link

    def find_tokens(self, link: Link, prompt: TokenIds) -> Link:
        """Return ``link``, below the longest recorded path that ``prompt`` begins with.

        A path is a prompt and its reply. The link stays as it is if there is no such path.
        """
        point, _ = self.tree.find(prompt)
        for node, count in path_nodes(point.node, point.position):
            call_id, _, name = (node.id or "").rpartition(".")
            turn = self.turns.turns.get(call_id)
            if turn is None or turn.prompt is None or name == "o" or count < len(node.token_ids):
                continue
            base = None if link.seen.depth else turn
            return structs.replace(
                link,
                parent=turn,
                base=base,
                choice=0 if base is None else int(name[1:]),
                rule="token_prefix",
                confidence=0.9,
            )
        return link

    def grow(
        self,
        call_id: str,
        link: Link,
        choices: Sequence[Choice],
        prompt: TokenIds | None,
        sent: TokenIds | None = None,
        experts: RoutedExperts | None = None,
    ) -> tuple[Growth, bool]:
        """Put a call's tokens into the tree.

        ``prompt`` holds the ids that the engine used, and ``sent`` the ids that it was sent.
        ``experts`` are those behind the last tokens of the prompt. Return the growth and whether
        both ids are the same.
        """
        exact = prompt is not None and (
            prompt is sent or (sent is not None and np.array_equal(prompt, sent))
        )
        near = None if link.base is None else link.base.tip(link.choice)
        known = near.end if exact and near is not None else 0
        growth = self.tree.grow(call_id, prompt, choices, near, known, experts)
        if prompt is not None and growth.prompt_span_id is not None:
            self.prompt.settle(prompt, Point(self.tree.nodes[growth.prompt_span_id], len(prompt)))
        return growth, exact

    def observe(self, call_id: str, link: Link, prompt: TokenIds, reply: TokenIds) -> Growth:
        """Put the tokens of a replayed call into the tree, all of them as observed ones.

        The growth's prompt ends within a span, where its reply begins.
        """
        near = None if link.base is None else link.base.tip(link.choice)
        growth = self.tree.grow(call_id, np.concatenate([prompt, reply]), (), near)
        node = self.tree.nodes[growth.prompt_span_id]
        while node.parent is not None and node.start >= len(prompt):
            node = node.parent
        return structs.replace(growth, prompt_span_id=node.id)

    def turn(
        self,
        call_id: str,
        link: Link,
        status: CallStatus,
        messages: Sequence[Message] = (),
        growth: Growth | None = None,
        prompt_length: int = 0,
        *,
        replayed: bool = False,
    ) -> Turn:
        """Return the turn of a call that is over.

        ``messages`` are its replies, ``growth`` its tokens. Without them, or without a known
        prompt, nothing is built on it. The first reply of a ``replayed`` call is the end of the
        call's observed tokens.
        """
        nodes, prompt = self.tree.nodes, None
        if growth is not None and (tip := nodes.get(growth.prompt_span_id)) is not None:
            prompt = Point(tip, prompt_length)
        choices: list[Sampled] = []
        for index, sampled in enumerate(messages):
            prefill = link.seen.prefill
            message = prefilled(sampled, prefill) if prefill else sampled
            digest, form = self.turns.digester.reply(message)
            name = f"{call_id}.o" if replayed and index == 0 else f"{call_id}.s{index}"
            node = None if prompt is None else nodes.get(name)
            choices.append(Sampled(message, digest, form, node))
        return Turn(
            call_id=call_id,
            session_id=self.id,
            parent_call_id=None if link.parent is None else link.parent.call_id,
            status=status,
            seen=link.seen,
            base=link.base,
            base_choice=0 if link.base is None else link.choice,
            choices=tuple(choices),
            ending=None if (text := ending_text(link.tail)) is None else Ending.of(text),
            prompt=prompt,
        )

    def add(self, turn: Turn) -> None:
        """Add a call that is over, or replace its turn."""
        self.turns.add(turn)
        self.calls.add(turn.call_id)

    def trim(self) -> bool:
        """Remove half of the turns that nothing is built on, longest out of use first.

        Return whether there were any. One line is always kept whole.
        """
        leaves = self.turns.leaves()
        idle = leaves[: len(leaves) // 2]
        for turn in idle:
            self.turns.remove(turn)
            self.tree.drop(turn.call_id)
        return bool(idle)

    def dissolve(self) -> None:
        """Remove its turns from a shared index, and dissolve its token tree."""
        if self.turns.unrelated:
            for call_id in self.calls:
                turn = self.turns.turns.get(call_id)
                if turn is not None:
                    self.turns.remove(turn)
        self.tree.dissolve()
