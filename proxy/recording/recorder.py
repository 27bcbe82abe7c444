"""The record of a call, grown from the same events that its client gets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from bridle.proxy.continuation.context import TRUSTED, CallContext
from bridle.proxy.continuation.prompt import Prompt
from bridle.proxy.engines.policy_gate import PolicyGate
from bridle.proxy.lineage.conversations import SessionConversations
from bridle.proxy.lineage.lineage import Link, Sampled, Turn
from bridle.proxy.ports import CallWriter, Versioned
from bridle.proxy.recording.metrics import Metrics
from bridle.proxy.recording.stored_responses import begins_with_instructions
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
    CallBegun,
    CallEnded,
    CallStatus,
    Choice,
    Conversation,
    Note,
    SessionRecord,
    TokenIds,
    VersionRun,
    is_frozen,
    logprob_array,
    token_array,
)
from bridle.store.writing.integrity import contradiction

if TYPE_CHECKING:
    from bridle.proxy.continuation.continuation import Continuer


class Recorder:
    """Begins records and commits their ends."""

    def __init__(
        self,
        writer: CallWriter,
        conversations: SessionConversations,
        gate: PolicyGate,
        metrics: Metrics,
        continuer: Continuer | None,
        observers: Sequence[Observer] = (),
        *,
        forward: bool = False,
    ) -> None:
        """``observers`` are told of every call after its commit; they must not block. ``forward``:
        a call goes on although the store does not take its beginning."""
        self._observers = tuple(observers)
        self._forward = forward
        self._writer = writer
        self._continuer = continuer
        self._conversations = conversations
        self._gate = gate
        self._metrics = metrics

    def begin(
        self,
        begun: CallBegun,
        session: SessionRecord,
        request: Request,
        link: Link,
        prompt: Prompt,
    ) -> Recording:
        """Raises ``StoreUnavailable`` when the store takes no more."""
        try:
            self._writer.begin_call(begun)
        except StoreUnavailable:
            if not self._forward:
                raise  # Else: its end is not taken either, and counted as unrecorded then.
        self._conversations.begin(begun.id)
        context = CallContext(link, prompt, self._continuer)
        recording = Recording(begun, session, request, context, self._gate)
        still_open = self._conversations.in_flight(link.unknown)
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
            self._conversations.end(recording.begun.id)
            raise
        asyncio.get_running_loop().call_soon(self._over, recording, ended, turn)

    def _over(self, recording: Recording, ended: CallEnded, turn: Turn) -> None:
        try:
            self._conversations.add(recording.session, turn)
        finally:
            self._conversations.end(recording.begun.id)
        self._metrics.count_call(recording.begun.dialect, recording.begun.started_at, ended)
        for observe in self._observers:
            observe(recording, ended)


Observer = Callable[["Recording", CallEnded], None]


class Recording:
    """One call between its beginning and its end."""

    def __init__(
        self,
        begun: CallBegun,
        session: SessionRecord,
        request: Request,
        context: CallContext,
        gate: PolicyGate,
    ) -> None:
        self.begun = begun
        self.session = session
        self.fold = Fold()
        self.model_served: str | None = None
        self.sampling: Mapping[str, Any] = {}
        self.notes: list[Note] = list(request.notes)
        self._request = request
        self._context = context
        self._link = context.link
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
        break_reason, notes = self._context.judged(self._request, None if frozen else ids)
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
        turn = self._turn(status, choices, messages, prompt)
        ended = CallEnded(
            id=self.begun.id,
            session_id=self.begun.session_id,
            status=status,
            ended_at=time.time(),
            first_token_at=self._first_token_at,
            prompt_token_ids=prompt,
            choices=choices,
            response_body=b"".join(self._sent),
            model_served=self.model_served,
            usage={} if reply.usage is None else msgspec.structs.asdict(reply.usage),
            sampling=self.sampling,
            replies=tuple(messages),
            kind=self._context.kind(),
            role=self._link.seen.agent,
            break_reason=break_reason,
            reason=reason,
            error={} if error is None else _error_fields(error),
            notes=(*self.notes, *notes, *self._context.retry(), *self._context.left_out(status)),
            compared=True,
        )
        found = contradiction(ended) if status in TRUSTED else None
        if found is None:
            return ended, turn
        status = CallStatus.QUARANTINED
        return quarantined(ended, found), self._turn(status, choices, messages, prompt)

    def _turn(
        self,
        status: CallStatus,
        choices: Sequence[Choice],
        messages: Sequence[Message],
        prompt: TokenIds | None,
    ) -> Turn:
        """Of a quarantined or frozen call the replies alone: its echo is recognised, and a call
        that echoes it is a break, ``parent_without_ids``."""
        trusted = status in TRUSTED and not is_frozen(self.notes)
        return Turn.of(
            self.begun.id,
            self._link,
            status=status,
            choices=[
                Sampled(message, choice.token_ids, choice.finish_reason)
                for message, choice in zip(messages, choices, strict=True)
            ],
            prompt_token_ids=prompt if trusted else None,
        )

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
