"""The lineage state of sessions: in memory while in use, else rebuilt from the store."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from proxy.canonical import Request
from proxy.lineage import Conversations, Link, Sampled, Turn, message_from_chat
from store.errors import NotFound
from store.queries import CallRow, Reader
from store.records import CallStatus, SessionRecord, Span, TokenIds

log = logging.getLogger("bridle.proxy")

_CARRY_TOKENS: Final = frozenset({CallStatus.COMPLETE, CallStatus.PARTIAL})
_LOBBY_SESSIONS: Final = 64
"""How many of the latest anonymous sessions a restarted proxy remembers."""


def is_anonymous(session: SessionRecord) -> bool:
    """Nothing but its conversation leads to this session."""
    return session.name is None and session.key_hash is None


class SessionConversations:
    """An LRU of :class:`Conversations` by session; anonymous sessions share one, the lobby.

    In the lobby the next call of a harness that sends no session id finds the call before it, and
    by that its session.
    """

    def __init__(self, reader: Reader, capacity: int) -> None:
        self._reader = reader
        self._capacity = capacity
        self._lobby = Conversations(max_turns=4096, max_tokens=4_194_304)
        self._lobby_sessions: OrderedDict[str, str] = OrderedDict()
        """Call id -> session id, for the calls in the lobby."""
        self._sessions: OrderedDict[str, Conversations] = OrderedDict()

    async def start(self) -> None:
        """Takes the latest anonymous sessions into the lobby."""
        latest = await asyncio.to_thread(
            lambda: list(
                self._reader.sessions(sealed=False, newest_first=True, limit=_LOBBY_SESSIONS)
            )
        )
        for session in reversed(latest):
            if is_anonymous(session):
                await self._load(session.id, self._lobby)

    def opened(self, session: SessionRecord) -> None:
        """The session is new: there is nothing of it in the store."""
        if not is_anonymous(session):
            self._keep(session.id, Conversations())

    async def find(self, session_id: str, request: Request, agent: str | None) -> Link:
        """Where ``request`` belongs in its session.

        What memory does not explain another process may have recorded, so the store is asked.
        """
        conversations = self._sessions.get(session_id)
        if conversations is None:
            conversations = Conversations()
            await self._load(session_id, conversations)
            conversations = self._sessions.setdefault(session_id, conversations)
            self._keep(session_id, conversations)
            return conversations.find(request, agent=agent)
        self._sessions.move_to_end(session_id)
        link = conversations.find(request, agent=agent)
        if _unexplained(link, request) and await self._load(session_id, conversations):
            link = conversations.find(request, agent=agent)
        return link

    async def find_anonymous(self, request: Request) -> tuple[Link, str | None]:
        """Where a request without any session belongs, and the session that it continues."""
        link = self._lobby.find(request)
        for call_id in reversed(link.unknown):
            try:
                row = await asyncio.to_thread(self._reader.call, call_id)
            except NotFound:
                continue
            if await self._load(row.session_id, self._lobby):
                link = self._lobby.find(request)
            break
        continued = link.parent.call_id if link.parent is not None else None
        return link, self._lobby_sessions.get(continued or "")

    def add(self, session: SessionRecord, turn: Turn) -> None:
        """A call of the session is over and recorded."""
        if is_anonymous(session):
            self._add_to_lobby(session.id, turn)
        else:
            conversations = self._sessions.get(session.id)
            if conversations is not None:
                conversations.add(turn)

    def _add_to_lobby(self, session_id: str, turn: Turn) -> None:
        self._lobby.add(turn)
        self._lobby_sessions[turn.call_id] = session_id
        while len(self._lobby_sessions) > 2 * self._lobby.max_turns:
            self._lobby_sessions.popitem(last=False)

    def _keep(self, session_id: str, conversations: Conversations) -> None:
        self._sessions[session_id] = conversations
        self._sessions.move_to_end(session_id)
        while len(self._sessions) > self._capacity:
            self._sessions.popitem(last=False)

    async def _load(self, session_id: str, conversations: Conversations) -> bool:
        """Adds the session's recorded calls that ``conversations`` does not know; whether any."""
        rows, spans = await asyncio.to_thread(self._read, session_id)
        added = False
        for row in rows:
            if row.status is CallStatus.OPEN or conversations.get(row.id) is not None:
                continue
            turn = _turn(row, spans, conversations)
            if turn is None:
                continue
            added = True
            if conversations is self._lobby:
                self._add_to_lobby(session_id, turn)
            else:
                conversations.add(turn)
        return added

    def _read(self, session_id: str) -> tuple[list[CallRow], dict[str, Span]]:
        rows = self._reader.calls(session_id)
        return rows, {span.id: span for span in self._reader.spans(session_id)}


def _unexplained(link: Link, request: Request) -> bool:
    """Whether the request shows a history that memory does not hold."""
    if link.unknown:
        return True
    return link.parent is None and any(message.role == "assistant" for message in request.messages)


def _turn(row: CallRow, spans: Mapping[str, Span], conversations: Conversations) -> Turn | None:
    """A recorded call as a turn; ``None`` when its state cannot be used, which is logged."""
    state = row.conversation.get("lineage")
    if not state:
        return None
    base = conversations.get(state["base"]) if state.get("base") else None
    trusted = row.status in _CARRY_TOKENS
    try:
        return Turn.from_state(
            state,
            call_id=row.id,
            parent_call_id=row.parent_call_id,
            status=row.status,
            base=base,
            choices=_choices(row, spans) if trusted else (),
            prompt_token_ids=_prompt(row, spans) if trusted else None,
        )
    except ValueError as error:
        log.warning("lineage_state_unusable: %s", error)
        return None


def _choices(row: CallRow, spans: Mapping[str, Span]) -> list[Sampled]:
    messages: list[Mapping[str, Any]] = [row.message, *row.conversation.get("choices", ())]
    sampled: list[Sampled] = []
    for index, message in enumerate(messages):
        if not message:
            continue
        span = spans.get(f"{row.id}.s{index}")
        ids = np.empty(0, dtype=np.uint32) if span is None else span.token_ids
        sampled.append(Sampled(message_from_chat(message), ids))
    return sampled


def _prompt(row: CallRow, spans: Mapping[str, Span]) -> TokenIds | None:
    """The call's prompt ids from its path in the tree; ``None`` when they are not there."""
    if row.prompt_tokens is None or row.prompt_span_id is None:
        return None
    pieces: list[TokenIds] = []
    end, link = row.prompt_tokens, row.prompt_span_id
    while end and link in spans:
        span = spans[link]
        if span.start < end:
            pieces.append(span.token_ids[: end - span.start])
            end = span.start
        if span.parent_id is None:
            break
        link = span.parent_id
    return np.concatenate(pieces[::-1]) if pieces and not end else None
