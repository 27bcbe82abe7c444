"""The record of a call, grown from the same events that its client gets."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from proxy.canonical import (
    ApiError,
    ChoiceReply,
    Event,
    Message,
    Request,
    Tokens,
    Usage,
)
from proxy.fold import Fold
from proxy.metrics import Metrics
from proxy.policy_gate import PolicyGate
from proxy.ports import CallWriter
from store.integrity import contradiction, has_ids
from store.records import (
    BreakReason,
    CallBegun,
    CallEnded,
    CallKind,
    CallStatus,
    Choice,
    Note,
    VersionRun,
)


class Recorder:
    """Begins records and commits their ends."""

    def __init__(self, writer: CallWriter, gate: PolicyGate, metrics: Metrics) -> None:
        self._writer = writer
        self._gate = gate
        self._metrics = metrics

    def begin(self, begun: CallBegun, request: Request) -> Recording:
        """Raises ``StoreUnavailable`` when the store takes no more."""
        self._writer.begin_call(begun)
        return Recording(begun, request, self._gate)

    async def commit(self, recording: Recording, ended: CallEnded) -> None:
        """Returns when ``ended`` is durable. Raises ``StoreUnavailable``."""
        await self._writer.end_call(ended)
        self._metrics.count_call(recording.begun.dialect, recording.begun.started_at, ended)


class Recording:
    """One call between its beginning and its end."""

    def __init__(self, begun: CallBegun, request: Request, gate: PolicyGate) -> None:
        self.begun = begun
        self.fold = Fold()
        self.first_token_at: float | None = None
        self.model_served: str | None = None
        self.sampling: Mapping[str, Any] = {}
        self.conversation: dict[str, Any] = {}
        self.kind = CallKind.UNKNOWN
        self.role: str | None = None
        self.break_reason: BreakReason | None = None
        self.notes: list[Note] = list(request.notes)
        self._gate = gate
        self._sent: list[bytes] = []
        self._versions: dict[int, list[VersionRun]] = {}

    def take(self, events: Sequence[Event]) -> None:
        """Folds ``events`` and stamps their tokens with the policy version of this moment."""
        fold = self.fold
        for event in events:
            if type(event) is Tokens and event.token_ids:
                self._stamp(event)
            fold.take(event)

    def sent(self, body: bytes) -> None:
        """``body`` goes to the client."""
        self._sent.append(body)

    def ended(
        self, status: CallStatus, *, reason: str | None = None, error: ApiError | None = None
    ) -> CallEnded:
        """The record as it stands; a contradiction within it makes it ``QUARANTINED``."""
        reply = self.fold.reply()
        ids = reply.prompt_token_ids
        ended = CallEnded(
            id=self.begun.id,
            session_id=self.begun.session_id,
            status=status,
            ended_at=time.time(),
            first_token_at=self.first_token_at,
            prompt_token_ids=None if ids is None else np.array(ids, dtype=np.uint32),
            choices=tuple(
                Choice(
                    token_ids=np.array(choice.token_ids, dtype=np.uint32),
                    logprobs=np.array(choice.logprobs, dtype=np.float32),
                    versions=tuple(self._versions.get(index, ())),
                    finish_reason=choice.finish_reason,
                )
                for index, choice in enumerate(reply.choices)
            ),
            response_body=b"".join(self._sent),
            model_served=self.model_served,
            usage=_usage_fields(reply.usage),
            sampling=self.sampling,
            message=reply_message(reply.choices[0]) if reply.choices else {},
            conversation=self.conversation,
            kind=self.kind,
            role=self.role,
            break_reason=self.break_reason,
            reason=reason,
            error={} if error is None else _error_fields(error),
            notes=tuple(self.notes),
        )
        return _checked(ended)

    def _stamp(self, tokens: Tokens) -> None:
        if self.first_token_at is None:
            self.first_token_at = time.time()
        version = self._gate.version
        runs = self._versions.setdefault(tokens.choice, [])
        if not runs or runs[-1].version != version:
            runs.append(VersionRun(self.fold.token_count(tokens.choice), version))


def _checked(ended: CallEnded) -> CallEnded:
    """``ended``, quarantined when its ids, logprobs and usage contradict each other."""
    if ended.status not in (CallStatus.COMPLETE, CallStatus.PARTIAL):
        return ended
    if not has_ids(ended):
        return replace(ended, notes=(*ended.notes, Note("no_token_ids")))
    found = contradiction(ended)
    if found is None:
        return ended
    word = found.partition(":")[0].partition(" ")[0]
    notes = (*ended.notes, Note(f"quarantined_{word}", found))
    return replace(ended, status=CallStatus.QUARANTINED, reason=found, notes=notes)


def reply_message(choice: ChoiceReply) -> dict[str, Any]:
    """The reply as a chat message, its tool calls under their minted ids."""
    message = Message(
        role="assistant",
        content=None if choice.tool_calls and not choice.text else choice.text,
        reasoning=choice.reasoning or None,
        tool_calls=tuple(choice.tool_calls),
    )
    return message.to_chat()


def _usage_fields(usage: Usage | None) -> dict[str, Any]:
    return {} if usage is None else msgspec.structs.asdict(usage)


def _error_fields(error: ApiError) -> dict[str, Any]:
    return {"kind": error.kind, "message": error.message, "status": error.status}
