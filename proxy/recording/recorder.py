"""The record of a call, grown from the same events that its client gets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from bridle.proxy.continuation.context import TRUSTED, CallContext
from bridle.proxy.continuation.prompt import Prompt
from bridle.proxy.lineage.conversations import SessionConversations
from bridle.proxy.lineage.lineage import Link, Sampled, Turn
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
    Note,
    SessionRecord,
    TokenIds,
    VersionRun,
    is_frozen,
    logprob_array,
    token_array,
)
from bridle.store.writing.integrity import contradiction
from bridle.store.writing.writer import Writer

if TYPE_CHECKING:
    from bridle.proxy.continuation.continuation import Continuer


class CallOutcome(msgspec.Struct, frozen=True, gc=False):
    """How a call ended, as the one who served it knows it."""

    status: CallStatus
    notes: tuple[Note, ...] = ()
    sampling: Mapping[str, Any] = {}
    """Effective sampling parameters, as sent."""
    model_served: str | None = None
    policy_version: int = 0
    """Of the engine that answered, at the end of the call."""
    reason: str | None = None
    error: ApiError | None = None


Observer = Callable[[CallBegun, CallEnded, CallOutcome], None]


class Recorder:
    """Begins records and commits their ends."""

    def __init__(
        self,
        writer: Writer,
        conversations: SessionConversations,
        metrics: Metrics,
        continuer: Continuer | None,
        observers: Sequence[Observer] = (),
        *,
        forward: bool = False,
    ) -> None:
        """``observers`` get every call after its commit; they must not block. ``forward``: a call
        goes on although the store does not take its beginning."""
        self._observers = tuple(observers)
        self._forward = forward
        self._writer = writer
        self._continuer = continuer
        self._conversations = conversations
        self._metrics = metrics

    def begin(
        self, begun: CallBegun, session: SessionRecord, request: Request, link: Link, prompt: Prompt
    ) -> Recording:
        """Raises ``StoreUnavailable`` when the store takes no more."""
        try:
            self._writer.begin_call(begun)
        except StoreUnavailable:
            if not self._forward:
                raise  # Otherwise its end is refused, too, and counted as unrecorded then.
        self._conversations.begin(begun.id)
        return Recording(begun, session, request, CallContext(link, prompt, self._continuer))

    async def commit(self, recording: Recording, outcome: CallOutcome) -> None:
        """Returns when the call's end is durable. Other calls may continue it from then on:
        lineage, metrics and observers get it in the loop's next turn, before that of any request
        that comes later, while the client reads its reply.

        Raises ``StoreUnavailable``.
        """
        try:
            ended, turn = recording.ended(outcome)
            await self._writer.end_call(ended)
        except BaseException:
            self._conversations.end(recording.begun.id)
            raise
        asyncio.get_running_loop().call_soon(self._over, recording, outcome, ended, turn)

    def _over(
        self, recording: Recording, outcome: CallOutcome, ended: CallEnded, turn: Turn
    ) -> None:
        begun = recording.begun
        try:
            self._conversations.add(recording.session, turn)
        finally:
            self._conversations.end(begun.id)
        self._metrics.count_call(begun.dialect, begun.started_at, ended)
        for observe in self._observers:
            observe(begun, ended, outcome)


class Recording:
    """The record of one call, grown from the events of its reply."""

    def __init__(
        self, begun: CallBegun, session: SessionRecord, request: Request, context: CallContext
    ) -> None:
        self.begun = begun
        self.session = session
        self.fold = Fold()
        self._request = request
        self._context = context
        self._link = context.link
        self._first_token_at: float | None = None
        self._sent: list[bytes] = []
        self.sent = self._sent.append
        """Takes the bytes that go to the client."""
        self._versions: dict[int, list[VersionRun]] = {}
        self._stamped: dict[int, int] = {}
        """Choice -> the version of its latest tokens."""

    def take(self, events: Sequence[Event], version: int) -> None:
        """Folds ``events`` and stamps their tokens with the policy ``version`` of this moment."""
        stamped = self._stamped
        for event in events:
            if isinstance(event, Tokens) and stamped.get(event.choice) != version:
                self._stamp(event, version)
        self.fold.take(events)

    def ended(self, outcome: CallOutcome) -> tuple[CallEnded, Turn]:
        """The record as it stands, and the turn that lineage keeps of it. A contradiction within
        the record makes it ``QUARANTINED``."""
        status = outcome.status
        reply = self.fold.reply()
        ids = reply.prompt_token_ids
        messages = [assistant_message(choice) for choice in reply.choices]
        frozen = is_frozen(outcome.notes)
        break_reason, notes = self._context.judged(self._request, None if frozen else ids)
        # Logprobs without ids, as some providers send them, belong to no token.
        with_ids = ids is not None or any(choice.token_ids for choice in reply.choices)
        prompt = None if ids is None else token_array(ids)
        choices = tuple(
            [
                Choice(
                    token_ids=token_array(choice.token_ids),
                    logprobs=logprob_array(choice.logprobs if with_ids else ()),
                    versions=tuple(self._versions.get(index, ())),
                    finish_reason=choice.finish_reason,
                )
                for index, choice in enumerate(reply.choices)
            ]
        )
        turn = self._turn(status, choices, messages, None if frozen else prompt)
        ended = CallEnded(
            id=self.begun.id,
            session_id=self.begun.session_id,
            status=status,
            ended_at=time.time(),
            first_token_at=self._first_token_at,
            prompt_token_ids=prompt,
            choices=choices,
            response_body=b"".join(self._sent),
            model_served=outcome.model_served,
            usage={} if reply.usage is None else msgspec.structs.asdict(reply.usage),
            sampling=outcome.sampling,
            message=messages[0].to_chat() if messages else {},
            conversation=self._conversation(turn, messages),
            kind=self._context.kind(),
            role=self._link.seen.agent,
            break_reason=break_reason,
            reason=outcome.reason,
            error={} if outcome.error is None else _error_fields(outcome.error),
            notes=(*outcome.notes, *notes, *self._context.retry(), *self._context.left_out(status)),
            compared=True,
        )
        found = contradiction(ended) if status in TRUSTED else None
        if found is None:
            return ended, turn
        status = CallStatus.QUARANTINED
        return quarantined(ended, found), self._turn(
            status, choices, messages, None if frozen else prompt
        )

    def _turn(
        self,
        status: CallStatus,
        choices: Sequence[Choice],
        messages: Sequence[Message],
        prompt: TokenIds | None,
    ) -> Turn:
        """Of a quarantined or frozen call the replies alone: its echo is recognised, and a call
        that echoes it is a break, ``parent_without_ids``."""
        trusted = status in TRUSTED
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

    def _conversation(self, turn: Turn, messages: Sequence[Message]) -> dict[str, Any]:
        """What rebuilds the request's messages (the base's conversation and reply, then ``tail``)
        and lineage's own state. ``tools`` stands here only where they differ from the base's."""
        link, base = self._link, self._link.base
        conversation: dict[str, Any] = {
            "tail": [message.to_chat() for message in link.tail],
            "lineage": turn.to_state(),
        }
        if base is None or base.seen.tools != link.seen.tools:
            conversation["tools"] = list(self._request.tools)
        if begins_with_instructions(self._request):
            conversation["instructions"] = True
        if len(messages) > 1:
            conversation["choices"] = [message.to_chat() for message in messages[1:]]
        return conversation

    def _stamp(self, tokens: Tokens, version: int) -> None:
        """The choice's tokens are sampled from ``version``, from these on."""
        if not tokens.token_ids:
            return
        if self._first_token_at is None:
            self._first_token_at = time.time()
        run = VersionRun(self.fold.token_count(tokens.choice), version)
        self._versions.setdefault(tokens.choice, []).append(run)
        self._stamped[tokens.choice] = version


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
