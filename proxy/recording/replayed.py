"""The record of a call that got the reply of a recorded one, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bridle.proxy.continuation.prompt import NO_PROMPT
from bridle.proxy.recording.recorder import Recording
from bridle.proxy.replay.recorded import RecordedCall
from bridle.proxy.session.session import Session
from bridle.proxy.session.turn import Link, Turn
from bridle.proxy.wire.canonical import Request
from bridle.store.call import CallBegun, CallEnded, EndedFacts
from bridle.store.records import Message


class ReplayedRecording(Recording):
    """The record of a replayed call: its tokens are observed, and none is sampled."""

    def __init__(
        self,
        begun: CallBegun,
        session: Session,
        request: Request,
        link: Link,
        recorded: RecordedCall,
        replies: tuple[Message, ...],
        now: Callable[[], float],
        *,
        edited: bool = False,
    ) -> None:
        """Create it. ``replies`` are the recorded ones, with the tool-call ids of this call.

        They are others if the reply was ``edited``; the record then has no tokens of it.
        """
        super().__init__(begun, session, request, link, NO_PROMPT, now)
        self._recorded = recorded
        self._replies = replies
        self._edited = edited

    def ended(
        self,
        outcome: EndedFacts,
        contradicted: str | None = None,
        vocabulary: int | None = None,
    ) -> tuple[CallEnded, Turn]:
        """Return the call's record and its turn. The recorded call has been checked already."""
        session, call_id, link = self.session, self.begun.id, self.link
        prompt = self._recorded.prompt
        reply = None if self._edited else self._recorded.reply
        growth = None
        if prompt is not None and reply is not None:
            growth = session.observe(call_id, link, prompt, reply)
        length = 0 if growth is None or prompt is None else len(prompt)
        turn = session.turn(
            call_id, link, outcome.status, self._replies, growth, length, replayed=True
        )
        facts = replace(
            outcome,
            ended_at=self.now(),
            role=link.seen.agent,
            break_reason=link.break_reason,
            usage={} if growth is None else {"prompt_tokens": length, "completion_tokens": 0},
            model_served=self._recorded.row.model_served,
        )
        ended = CallEnded(
            **vars(facts),
            id=call_id,
            session_id=session.id,
            prompt_token_ids=None if growth is None else prompt,
            growth=growth,
            response_body=b"".join(self._sent),
            replies=self._replies,
            compared=True,
        )
        return ended, turn
