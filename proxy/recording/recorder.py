"""The record of a call, grown from the same events that its client gets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from bridle.proxy.continuation.explanations import Explanations
from bridle.proxy.continuation.prompt import CallPrompt
from bridle.proxy.engines.policy_gate import PolicyGate
from bridle.proxy.lineage.turn import TRUSTED, Link, Turn
from bridle.proxy.ports import CallWriter, Versioned
from bridle.proxy.recording.metrics import Metrics
from bridle.proxy.recording.stored_responses import begins_with_instructions
from bridle.proxy.sessions.memory import SessionMemory
from bridle.proxy.sessions.session import Session
from bridle.proxy.wire.canonical import (
    ApiError,
    ChoiceReply,
    Event,
    Message,
    Request,
    Tokens,
)
from bridle.proxy.wire.fold import Fold
from bridle.store.errors import StoreUnavailable
from bridle.store.records import (
    BreakReason,
    CallBegun,
    CallEnded,
    CallStatus,
    Choice,
    Conversation,
    Growth,
    Note,
    TokenIds,
    VersionRun,
    is_frozen,
    logprob_array,
    token_array,
)
from bridle.store.writing.integrity import contradiction


class Recorder:
    """Begins records and commits their ends."""

    def __init__(
        self,
        writer: CallWriter,
        memory: SessionMemory,
        gate: PolicyGate,
        metrics: Metrics,
        explanations: Explanations,
        observers: Sequence[Observer] = (),
        *,
        forward: bool = False,
    ) -> None:
        """``observers`` are told of every call after its commit; they must not block. ``forward``:
        a call goes on although the store does not take its beginning."""
        self._observers = tuple(observers)
        self._forward = forward
        self._writer = writer
        self._memory = memory
        self._explanations = explanations
        self._gate = gate
        self._metrics = metrics

    def begin(
        self,
        begun: CallBegun,
        session: Session,
        request: Request,
        link: Link,
        prompt: CallPrompt,
    ) -> Recording:
        """Raises ``StoreUnavailable`` when the store takes no more."""
        try:
            self._writer.begin_call(begun)
        except StoreUnavailable:
            if not self._forward:
                raise  # Else: its end is not taken either, and counted as unrecorded then.
        self._memory.begin(session, begun.id)
        recording = Recording(begun, session, request, link, prompt, self._gate)
        still_open = self._memory.running(link.unknown)
        recording.notes += [Note("echoed_call_still_open", call_id) for call_id in still_open]
        return recording

    async def commit(
        self,
        recording: Recording,
        status: CallStatus,
        *,
        reason: str | None = None,
        error: ApiError | None = None,
    ) -> None:
        """Returns when the call's end is durable. Other calls may continue it from then on: what
        lineage, metrics and observers do with it is the loop's next turn, before that of any
        request that comes later, and runs while the client reads its reply.

        Raises ``StoreUnavailable``.
        """
        try:
            ended, turn = recording.ended(status, reason=reason, error=error)
            await self._writer.end_call(ended)
        except BaseException:
            self._memory.end(recording.session, recording.begun.id)
            raise
        asyncio.get_running_loop().call_soon(self._over, recording, ended, turn)

    def _over(self, recording: Recording, ended: CallEnded, turn: Turn) -> None:
        self._memory.end(recording.session, recording.begun.id, turn)
        if ended.break_reason is BreakReason.UNEXPLAINED:
            self._explanations.begin(ended, recording.link, recording.request)
        self._metrics.count_call(recording.begun.dialect, recording.begun.started_at, ended)
        for observe in self._observers:
            observe(recording, ended)


Observer = Callable[["Recording", CallEnded], None]


class Recording:
    """One call between its beginning and its end."""

    def __init__(
        self,
        begun: CallBegun,
        session: Session,
        request: Request,
        link: Link,
        prompt: CallPrompt,
        gate: PolicyGate,
    ) -> None:
        self.begun = begun
        self.session = session
        self.fold = Fold()
        self.model_served: str | None = None
        self.sampling: Mapping[str, Any] = {}
        self.notes: list[Note] = list(request.notes)
        self.request = request
        self.link = link
        self._prompt = prompt
        self.policy: Versioned = gate
        """What is being sampled from: the pool's policy, then that of the engine that answers."""
        self._first_token_at: float | None = None
        self._sent: list[bytes] = []
        self.sent = self._sent.append
        """What goes to the client."""
        self._versions: dict[int, list[VersionRun]] = {}
        self._stamped: dict[int, int] = {}
        """Choice -> the version of its latest tokens."""

    def take(self, events: Sequence[Event]) -> None:
        """Folds ``events`` and stamps their tokens with the policy version of this moment."""
        stamped, version = self._stamped, self.policy.version
        for event in events:
            if isinstance(event, Tokens) and stamped.get(event.choice) != version:
                self._stamp(event, version)
        self.fold.take(events)

    def ended(
        self, status: CallStatus, *, reason: str | None = None, error: ApiError | None = None
    ) -> tuple[CallEnded, Turn]:
        """The record as it stands, and what lineage has to know of it. A contradiction within the
        record makes it ``QUARANTINED``."""
        reply = self.fold.reply()
        ids = reply.prompt_token_ids
        messages = [assistant_message(choice) for choice in reply.choices]
        frozen = is_frozen(self.notes)
        # A provider that tells no ids may tell logprobs to whom they then do not belong.
        told = ids is not None or any(choice.token_ids for choice in reply.choices)
        prompt = None if ids is None else token_array(ids)
        choices = tuple(
            [
                Choice(
                    token_ids=token_array(choice.token_ids),
                    logprobs=logprob_array(choice.logprobs if told else ()),
                    versions=tuple(self._versions.get(index, ())),
                    finish_reason=choice.finish_reason,
                )
                for index, choice in enumerate(reply.choices)
            ]
        )
        exact = self._prompt.used(prompt)
        growth = self.session.grow(self.begun.id, self.link, choices, prompt, exact=exact)
        notes: tuple[Note, ...] = ()
        break_reason = self.link.break_reason
        if prompt is not None and not frozen:
            break_reason, notes = self._prompt.verdict(self.link, growth, exact=exact)
        turn = self._turn(status, messages, None if frozen else growth, prompt)
        ended = CallEnded(
            id=self.begun.id,
            session_id=self.begun.session_id,
            status=status,
            ended_at=time.time(),
            first_token_at=self._first_token_at,
            prompt_token_ids=prompt,
            choices=choices,
            growth=growth,
            response_body=b"".join(self._sent),
            model_served=self.model_served,
            usage={} if reply.usage is None else msgspec.structs.asdict(reply.usage),
            sampling=self.sampling,
            replies=tuple(messages),
            kind=self.link.kind(),
            role=self.link.seen.agent,
            break_reason=break_reason,
            reason=reason,
            error={} if error is None else _error_fields(error),
            notes=(*self.notes, *notes, *self.link.notes(status)),
            compared=True,
        )
        found = contradiction(ended) if status in TRUSTED else None
        if found is None:
            return ended, turn
        status = CallStatus.QUARANTINED
        return quarantined(ended, found), self._turn(status, messages, None, None)

    def _turn(
        self,
        status: CallStatus,
        messages: Sequence[Message],
        growth: Growth | None,
        prompt: TokenIds | None,
    ) -> Turn:
        """Of a quarantined or frozen call the replies alone: its echo is recognised, and a call
        that echoes it is a break, ``parent_without_ids``."""
        if prompt is None or status not in TRUSTED:
            return self.session.turn(self.begun.id, self.link, status, messages)
        return self.session.turn(self.begun.id, self.link, status, messages, growth, len(prompt))

    def _stamp(self, tokens: Tokens, version: int) -> None:
        """The choice's tokens are sampled from ``version``, from these on."""
        if not tokens.token_ids:
            return
        if self._first_token_at is None:
            self._first_token_at = time.time()
        run = VersionRun(self.fold.token_count(tokens.choice), version)
        self._versions.setdefault(tokens.choice, []).append(run)
        self._stamped[tokens.choice] = version


def recorded_conversation(request: Request, link: Link) -> Conversation:
    """What the store keeps of the messages of a request."""
    return Conversation(
        tail=link.tail,
        tools=tuple(request.tools),
        length=len(request.messages),
        instructions=begins_with_instructions(request),
        lineage=link.state(),
    )


def quarantined(ended: CallEnded, found: str) -> CallEnded:
    """``ended`` with the contradiction that was ``found`` in it."""
    word = found.partition(":")[0].partition(" ")[0]
    notes = (*ended.notes, Note(f"quarantined_{word}", found))
    return msgspec.structs.replace(ended, status=CallStatus.QUARANTINED, reason=found, notes=notes)


def assistant_message(choice: ChoiceReply) -> Message:
    """The reply as the assistant's turn, its tool calls under their minted ids."""
    return Message(
        role="assistant",
        content=None if choice.tool_calls and not choice.text else choice.text,
        reasoning=choice.reasoning or None,
        tool_calls=tuple(choice.tool_calls),
    )


def _error_fields(error: ApiError) -> dict[str, Any]:
    return {"kind": error.kind, "message": error.message, "status": error.status}
