"""The record of a call, built from the same events that its client gets."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
import numpy as np
from zstandard import ZstdCompressor, ZstdDecompressor

from bridle.engine.contract.markup import unread_calls
from bridle.proxy.continuation.prompt import CallPrompt
from bridle.proxy.recording.logs import log, log_call
from bridle.proxy.recording.metrics import Metrics
from bridle.proxy.recording.token_facts import TokenFacts, read_facts
from bridle.proxy.session.harness_identity import kept_headers
from bridle.proxy.session.memory import SessionMemory
from bridle.proxy.session.session import Session
from bridle.proxy.session.turn import TRUSTED, Link, Turn
from bridle.proxy.wire.canonical import (
    ApiError,
    ChoiceReply,
    Message,
    Reply,
    Request,
    Usage,
    prefilled,
)
from bridle.proxy.wire.fold import Fold
from bridle.proxy.wire.histories import Repeats
from bridle.store.call import CallBegun, CallEnded, EndedFacts
from bridle.store.clock import Stopwatch
from bridle.store.records import (
    IDS_MISSING,
    LOGPROBS_MISSING,
    TOOL_CALLS_UNREAD,
    CallStatus,
    Choice,
    Conversation,
    Note,
    is_frozen,
    logprob_array,
    new_id,
    token_array,
)
from bridle.store.writing.integrity import contradiction
from bridle.store.writing.writer import Writer

_PACK: Final = ZstdCompressor(level=1).compress
_UNPACK: Final = ZstdDecompressor().decompress
_WITHOUT_IDS: Final = Note(IDS_MISSING)
_MANY_CHARACTERS: Final = 64 << 10
"""Characters of a reply that takes longer to digest than a thread takes to wake up."""


Observer = Callable[[CallBegun, CallEnded, str | None], None]
"""A function that gets the committed records of a call, and the name of the engine that replied or
that the call was last sent to."""


class Recorder:
    """A recorder that begins the records of calls and commits their ends."""

    def __init__(
        self,
        writer: Writer,
        memory: SessionMemory,
        metrics: Metrics,
        observers: Sequence[Observer] = (),
        *,
        vocabulary: int | None = None,
    ) -> None:
        """Create the recorder.

        ``observers`` get every call after its commit; they must not block. ``vocabulary`` is the
        number of the policy's token ids, if it is known.
        """
        self._vocabulary = vocabulary
        self._observers = tuple(observers)
        self._writer = writer
        self._memory = memory
        self._metrics = metrics

    def begin(
        self,
        session: Session,
        request: Request,
        body: bytes,
        headers: Mapping[str, str],
        watch: Stopwatch,
        link: Link,
        prompt: CallPrompt,
        repeats: Repeats | None = None,
    ) -> Recording:
        """Begin the record of a call, whose times are those of ``watch``.

        ``repeats`` is an earlier body, and the number of bytes that ``body`` begins with alike.

        Raises ``StoreUnavailable`` if the store accepts no more records.
        """
        begun = begun_call(session.id, request, body, headers, watch.started_at, link, repeats)
        self.open(session, begun)
        return Recording(begun, session, request, link, prompt, watch.now)

    def open(self, session: Session, begun: CallBegun) -> None:
        """Begin the record of a call. Raises ``StoreUnavailable`` as :meth:`begin` does."""
        self._writer.begin_call(begun)
        self._memory.begin(session, begun.id)

    async def commit(
        self,
        recording: Recording,
        outcome: EndedFacts,
        engine: str | None = None,
        contradiction: str | None = None,
    ) -> CallEnded:
        """Commit the end of a call, and return it when it is durable.

        Other calls may continue the call from then on. ``contradiction`` is the one between the
        reply and the request, or within the reply, that was found while it came.

        Lineage, metrics and observers get it in the event loop's next iteration, which precedes
        every later request.

        Raises ``StoreUnavailable``.
        """
        try:
            if recording.large:
                await asyncio.to_thread(recording.prepare)
            ended, turn = recording.ended(outcome, contradiction, self._vocabulary)
            await self._writer.end_call(ended)
        except BaseException:
            self._memory.end(recording.session, recording.begun.id)
            raise
        asyncio.get_running_loop().call_soon(self._over, recording, engine, ended, turn)
        return ended

    def _over(self, recording: Recording, engine: str | None, ended: CallEnded, turn: Turn) -> None:
        begun = recording.begun
        self._memory.end(recording.session, begun.id, turn)
        self._metrics.count_call(begun.dialect, begun.started_at, ended, recording.now())
        if log.isEnabledFor(logging.INFO):
            log_call(begun, ended)
        for observe in self._observers:
            observe(begun, ended, engine)


class Recording:
    """The record of one call, built from the events of its reply."""

    def __init__(
        self,
        begun: CallBegun,
        session: Session,
        request: Request,
        link: Link,
        prompt: CallPrompt,
        now: Callable[[], float] = time.time,
    ) -> None:
        """``now`` returns the time in seconds since 1970."""
        self.begun = begun
        self.session = session
        self.fold = Fold(now)
        self.now = now
        self.request = request
        self.link = link
        self._prompt = prompt
        self._sent: list[bytes] = []
        self._packed: list[bytes] = []
        """The bytes that were sent earlier, compressed: a long stream repeats itself."""
        self._facts: list[TokenFacts] | None = None
        """The facts of each choice's tokens, once :meth:`prepare` has read them."""
        self.sent = self._sent.append
        """A function that records bytes that are sent to the client."""

    def pack(self) -> int:
        """Compress the bytes that were sent since the last time.

        Return their compressed size in bytes.
        """
        packed = _PACK(b"".join(self._sent))
        self._sent.clear()
        self._packed.append(packed)
        return len(packed)

    @property
    def large(self) -> bool:
        """Return whether :meth:`prepare` belongs into a thread."""
        if self._packed or self.fold.characters > _MANY_CHARACTERS:
            return True
        return any(choice.routed_experts or choice.kept for choice in self.fold.reply().choices)

    def prepare(self) -> None:
        """Do what takes long with a large reply, so that :meth:`ended` finds it done."""
        reply = self.fold.reply()
        for choice in reply.choices:
            message = prefilled(assistant_message(choice), self.link.seen.prefill)
            self.session.turns.digester.reply(message)
        self._sent[:] = [b"".join((*map(_UNPACK, self._packed), *self._sent))]
        self._packed.clear()
        self._facts = self._read_facts(reply)

    def _read_facts(self, reply: Reply) -> list[TokenFacts]:
        ids = reply.prompt_token_ids
        return [read_facts(choice, None if ids is None else len(ids)) for choice in reply.choices]

    def ended(
        self,
        outcome: EndedFacts,
        contradicted: str | None = None,
        vocabulary: int | None = None,
    ) -> tuple[CallEnded, Turn]:
        """Return the call's final record, and its turn for lineage.

        The record is ``outcome`` with the facts that follow from the reply. A contradiction within
        the record makes the call ``QUARANTINED``. ``vocabulary`` is as for :class:`Recorder`.
        """
        status, reply = outcome.status, self.fold.reply()
        ids = reply.prompt_token_ids
        sent = None if self._prompt.recorded else self._prompt.token_ids
        frozen = is_frozen(outcome.notes)
        # Some providers send logprobs without ids, which then belong to no token.
        with_ids = ids is not None or any(choice.token_ids for choice in reply.choices)
        prompt = None if ids is None else token_array(ids)
        facts = self._facts or self._read_facts(reply)
        choices: list[Choice] = []
        missing = 0
        for choice, (experts, kept, _) in zip(reply.choices, facts, strict=True):
            logprobs = logprob_array(choice.logprobs if with_ids else ())
            missing += int(np.count_nonzero(np.isnan(logprobs)))
            sampled, versions = token_array(choice.token_ids), tuple(choice.versions)
            parts = (sampled, logprobs, versions, choice.finish_reason, kept, experts.sampled)
            choices.append(Choice(*parts))
        messages: list[Message] = []
        for choice in reply.choices:
            messages.append(assistant_message(choice))
        unread = unread_tool_calls(self.request, reply.choices)
        session, call_id, link = self.session, self.begun.id, self.link
        of_prompt = next(
            (one.experts.prompt for one in facts if one.experts.prompt is not None), None
        )
        growth, exact = session.grow(call_id, link, choices, prompt, sent, of_prompt)
        if prompt is None or frozen or status not in TRUSTED:
            turn = session.turn(call_id, link, status, messages)
        else:
            turn = session.turn(call_id, link, status, messages, growth, len(prompt))
        notes: tuple[Note, ...] = ()
        break_reason = link.break_reason
        if prompt is not None and not frozen and not exact:
            break_reason, notes = self._prompt.verdict(link, growth)
        by_reply = {
            "ended_at": self.now(),
            "first_token_at": self.fold.first_token_at,
            "usage": {} if reply.usage is None else _counts(reply.usage),
            "role": link.seen.agent,
            "break_reason": break_reason,
            "notes": (
                *outcome.notes,
                *notes,
                *unread,
                *(note for one in facts for note in one.notes),
                *([Note(LOGPROBS_MISSING, f"{missing} tokens")] if missing else ()),
                *([] if with_ids or frozen or not _has_text(reply.choices) else [_WITHOUT_IDS]),
            ),
        }
        ended = CallEnded(
            **vars(outcome) | by_reply,
            id=call_id,
            session_id=self.begun.session_id,
            prompt_token_ids=prompt,
            prompt_experts=of_prompt,
            choices=tuple(choices),
            growth=growth,
            response_body=b"".join(self._sent),
            replies=tuple(messages),
            compared=True,
        )
        found = None
        if status in TRUSTED:
            known = None if frozen else vocabulary  # a frozen model has another one
            found = contradicted or contradiction(ended, known)
        if found is None:
            return ended, turn
        # Its turn has the replies without tokens: a call that echoes it is found, with the break
        # ``parent_without_ids``.
        turn = session.turn(call_id, link, CallStatus.QUARANTINED, messages)
        return quarantined(ended, found), turn


def begun_call(
    session_id: str,
    request: Request,
    body: bytes,
    headers: Mapping[str, str],
    started_at: float,
    link: Link | None = None,
    repeats: Repeats | None = None,
) -> CallBegun:
    """Return the beginning of a call's record.

    ``headers`` are all of the client's. ``link`` is ``None`` for a call that is no part of the
    session's conversation. ``repeats`` is as for :meth:`Recorder.begin`.
    """
    parent = conversation = None
    call_id, kept = new_id("call"), kept_headers(headers)
    if link is not None:
        parent = link.parent
        conversation = Conversation(
            tail=link.tail,
            tools=tuple(request.tools),
            length=len(request.messages),
            instructions=request.instructions,
            lineage=link.state(),
        )
    return CallBegun(
        id=call_id,
        session_id=session_id,
        dialect=request.dialect,
        started_at=started_at,
        request_body=body,
        repeats=repeats,
        stream=request.stream,
        model_requested=request.model,
        parent_call_id=None if parent is None else parent.call_id,
        lineage_rule=None if link is None else link.rule,
        headers=kept,
        conversation=conversation,
    )


def unread_tool_calls(request: Request, choices: Sequence[ChoiceReply]) -> tuple[Note, ...]:
    """Return a note for each tool-call markup in the text of a reply to a request with tools.

    The engine took no call from the markup and returned it as text.
    """
    if not request.tools:
        return ()
    found = {unread_calls(choice.text): None for choice in choices if not choice.tool_calls}
    return tuple(Note(TOOL_CALLS_UNREAD, name) for name in found if name is not None)


def _counts(usage: Usage) -> dict[str, int]:
    """Return the counts that the upstream reported."""
    given = msgspec.structs.asdict(usage)
    return {name: value for name, value in given.items() if value is not None}


def _has_text(choices: Sequence[ChoiceReply]) -> bool:
    return any(choice.text or choice.reasoning or choice.tool_calls for choice in choices)


def quarantined(ended: CallEnded, found: str) -> CallEnded:
    """Return ``ended`` as quarantined, with the contradiction that was ``found`` in it."""
    kind = found.partition(":")[0].partition(" ")[0]
    notes = (*ended.notes, Note(f"quarantined_{kind}", found))
    return replace(ended, status=CallStatus.QUARANTINED, reason=found, notes=notes)


def assistant_message(choice: ChoiceReply) -> Message:
    """Return the reply as an assistant message; its tool calls have their minted ids."""
    return Message(
        role="assistant",
        content=None if choice.tool_calls and not choice.text else choice.text,
        reasoning=choice.reasoning or None,
        tool_calls=tuple(choice.tool_calls),
    )


def error_fields(error: ApiError) -> dict[str, Any]:
    """Return an error as the record of its call has it."""
    return {"kind": error.kind, "message": error.message, "status": error.status}
