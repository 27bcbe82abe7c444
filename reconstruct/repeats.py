"""Questions that a harness asked again, and replies that it left out, from the record alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Final, NamedTuple

from bridle.store.call import CallRow
from bridle.store.reading.conversation import ReplyId, base, completes_prompt, lineage_of
from bridle.store.records import CallStatus, Note

_CUT: Final = frozenset({CallStatus.FAILED, CallStatus.PARTIAL, CallStatus.INTERRUPTED})
REPETITIONS: Final = frozenset({"retry", "asked_again", "reply_dropped"})
"""Names of the notes on calls that repeat an earlier one's question."""
_REPLIED: Final = frozenset({CallStatus.COMPLETE, CallStatus.PARTIAL})


class Repetition(NamedTuple):
    """The earlier calls whose questions a call repeats."""

    asked: CallRow | None
    """The call that was asked the same, if its reply had not been used."""
    left_out: CallRow | None
    """The call whose question the request goes on from without its reply."""

    def notes(self) -> Iterator[Note]:
        """Yield the evidence: the id of the earlier call, and the status of its end."""
        if self.asked is not None:
            name = "retry" if self.asked.status in _CUT else "asked_again"
            yield Note(name, f"{self.asked.id} {self.asked.status}")
        if self.left_out is not None:
            yield Note("reply_dropped", self.left_out.id)


def with_repetitions(calls: Sequence[CallRow], found: Mapping[str, Repetition]) -> list[CallRow]:
    """Return the calls, in the same order, with notes on what they repeat.

    ``found`` are their :func:`repetitions`.
    """
    return [
        replace(call, notes=(*call.notes, *found[call.id].notes())) if call.id in found else call
        for call in calls
    ]


def repetitions(calls: Sequence[CallRow]) -> Mapping[str, Repetition]:
    """Return the repetitions of one session's calls, by call id.

    ``calls`` are in the order of their start. A call counts as asked before if it had ended when
    the other one began, and if no call had continued its reply.
    """
    asked_before = _AskedBefore()
    found = {call.id: asked_before.take(call) for call in calls}
    return {call_id: one for call_id, one in found.items() if one != _NOTHING}


_NOTHING: Final = Repetition(None, None)

_Question = tuple[ReplyId | None, bytes, bytes, str | None, bytes]
"""The reply that is continued, the digests of instructions and tools, the agent's name, and the
digest of the new steps."""


class _AskedBefore:
    """The calls so far, by what they were asked."""

    def __init__(self) -> None:
        self._asked: dict[_Question, list[CallRow]] = {}
        self._continued: set[str] = set()
        """The ids of the calls whose replies were used."""

    def take(self, call: CallRow) -> Repetition:
        """Return what the call repeats, and remember it for those after it."""
        lineage = lineage_of(call)
        if lineage is None or completes_prompt(call):
            return _NOTHING
        seen = lineage.digests
        questions = [
            (base(call), seen.system, seen.tools, seen.agent, steps)
            for steps in _beginnings(seen.units)
        ]
        before = reversed(self._asked.get(questions[-1], ()))
        latest = (one for one in before if _ask(one) == seen.ask and _over(one, call))
        asked = next(latest, None)
        if asked is not None and asked.id in self._continued:
            asked = None
        left_out = self._left_out(questions[:-1], call) if call.status in _REPLIED else None
        self._asked.setdefault(questions[-1], []).append(call)
        self._continued |= {call.parent_call_id or "", lineage.base_call_id or ""}
        return Repetition(asked, left_out)

    def _left_out(self, questions: Sequence[_Question], call: CallRow) -> CallRow | None:
        """Return the call that was asked the longest of the questions and whose reply is missing.

        Each call names the reply before it; those before that one have been named by then.
        """
        if call.conversation is None or any(
            message.role == "assistant" for message in call.conversation.tail
        ):
            return None
        for question in reversed(questions):
            for one in reversed(self._asked.get(question, ())):
                if one.replies and _over(one, call) and one.id not in self._continued:
                    return one
        return None


def _over(earlier: CallRow, call: CallRow) -> bool:
    return earlier.ended_at is not None and earlier.ended_at <= call.started_at


def _ask(call: CallRow) -> bytes:
    lineage = lineage_of(call)
    return b"" if lineage is None else lineage.digests.ask


def _beginnings(units: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the digest of no unit, of the first one, of the first two, and so on up to all."""
    digest = blake2b(digest_size=16)
    yield digest.digest()
    for unit in units:
        digest.update(unit)
        yield digest.digest()
