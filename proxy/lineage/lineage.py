"""Which earlier call a request continues, and how we know.

A session's turns form a tree (``proxy/lineage/turn.py``). A request is followed down from the
roots: its first steps must say what a root's request said, the next step must be that call's reply,
the steps after it must say what one of its children asked, and so on; the deepest call whose reply
is reached is the *base*. Echoed values that the proxy minted decide between replies that say the
same, and they name the *parent* also where the history above it was edited or compacted away; then
the link is a break and says why.

Agents that share a session cannot adopt each other's calls: a different system prompt, tool set,
first message or reply is a different path, an echoed id admits only the call that minted it, and
among equals a path with the same system prompt, tools and agent name wins.

Pure: no I/O, no clocks. A call's way through here::

    link = conversations.find(request, agent=…)       # before the engine is asked
    …
    turn = Turn.of(call_id, link, status=…, choices=[Sampled(message, token_ids, finish_reason)],
                   prompt_token_ids=…)                # when the call is over, however it ended
    conversations.add(turn)                           # link.state() is stored with the request

A request may echo a call that is not over for us yet (a client that cut a stream and went on at
once), or that another worker recorded: ``Link.unknown`` names such calls; wait for them or load
them, ``add`` them, and ``find`` again. A Responses request with ``previous_response_id`` is
expected with the stored conversation put before its messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import structs

from bridle.proxy.lineage.digests import Digester
from bridle.proxy.lineage.index import TurnIndex
from bridle.proxy.lineage.search import Search
from bridle.proxy.lineage.turn import Link, Sampled, Turn
from bridle.proxy.wire.canonical import Request
from bridle.store.records import TokenIds

__all__ = ["Conversations", "Link", "Sampled", "Turn"]


class Conversations:
    """The turns of one session, within bounds.

    When a bound is passed, turns that nothing is built on are forgotten (``forgotten`` counts
    them): lone calls before ends of longer lines, those longest out of use first. One line is
    always kept whole, so a session that is a single line holds as many ids as that line has.
    """

    def __init__(
        self,
        *,
        max_turns: int = 16_384,
        max_tokens: int = 16_777_216,
        unrelated: bool = False,
    ) -> None:
        """``unrelated``: the turns are of many sessions that know nothing of each other, so that
        two equal conversations are one run after another, not one that asked again."""
        self._strangers = unrelated
        self.max_turns = max_turns
        self.max_tokens = max_tokens
        self.forgotten = 0
        self._digester = Digester()
        self._index = TurnIndex()

    def __len__(self) -> int:
        return len(self._index.turns)

    @property
    def held_tokens(self) -> int:
        """Token ids in memory, four bytes each."""
        return self._index.held_tokens

    def get(self, call_id: str) -> Turn | None:
        return self._index.turns.get(call_id)

    def add(self, turn: Turn) -> None:
        """Remember a call that is over, or replace what was known of it."""
        known = self._index.turns.get(turn.call_id)
        if known is not None:
            self._index.remove(known)
        self._index.insert(turn)
        while len(self) > self.max_turns or self.held_tokens > self.max_tokens:
            if not self._forget():
                break

    def find(self, request: Request, *, agent: str | None = None) -> Link:
        """Where ``request`` belongs. ``agent`` is the harness' own name of the (sub-)agent, when
        its headers tell one. Changes nothing."""
        unrelated = self._strangers
        return Search(self._index, self._digester, request, agent, unrelated=unrelated).link()

    def find_tokens(self, link: Link, token_ids: TokenIds | Sequence[int]) -> Link:
        """``link``, or when it has no parent: below the longest recorded path (prompt and reply)
        that the prompt ``token_ids`` begins with."""
        if link.parent is not None:
            return link
        ids = np.asarray(token_ids, dtype=np.uint32)
        best, turn, choice = 0, None, 0
        for candidate in self._index.turns.values():
            for number, sampled in enumerate(candidate.choices):
                start = candidate.prompt_length
                end = start + len(sampled.token_ids)
                if not start < end <= len(ids) or end <= best:
                    continue
                # The reply is compared first: it is short and tells most candidates apart.
                if not np.array_equal(ids[start:end], sampled.token_ids):
                    continue
                prompt = candidate.prompt_token_ids
                if prompt is not None and np.array_equal(ids[:start], prompt):
                    best, turn, choice = end, candidate, number
        if turn is None:
            return link
        base = None if link.seen.depth else turn
        return structs.replace(
            link, parent=turn, base=base, choice=choice if base else 0,
            rule="token_prefix", confidence=0.9,
        )  # fmt: skip

    def _forget(self) -> bool:
        leaves = self._index.leaves()
        idle = leaves[: max(1, len(leaves) // 2)] if len(leaves) > 1 else []
        for turn in idle:
            self._index.remove(turn)
        self.forgotten += len(idle)
        return bool(idle)
