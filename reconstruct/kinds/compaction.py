"""Compactions: calls whose reply a shortened conversation quotes as its summary."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice
from typing import Final, NamedTuple

from bridle.reconstruct.conversation import digests, first_reply, new_messages, texts, tools
from bridle.store.reading.queries import CallRow
from bridle.store.reading.summaries import SUMMARY_LENGTH, quotable
from bridle.store.records import BreakReason

_SHORTENED: Final = (BreakReason.COMPACTED, BreakReason.EDITED)
"""Breaks of a conversation in which something was left out."""


def compactions(calls: Sequence[CallRow], handed_on: Collection[str]) -> set[str]:
    """Return the ids of the calls that summarise, and of those that asked for the same in vain.

    ``handed_on`` are the first calls of delegated conversations: the texts that they quote are
    their tasks.
    """
    continued = {call.parent_call_id for call in calls if call.break_reason is None}
    candidates = _Candidates()
    found: set[str] = set()
    for call in calls:
        begins = call.parent_call_id is None and call.id not in handed_on
        if begins or call.break_reason in _SHORTENED:
            found |= candidates.quoted_by(call, begins)
        if call.id not in continued:
            candidates.add(call)
    return found | _same_question([call for call in calls if call.id in found], calls)


class _Quoter(NamedTuple):
    """The properties of a conversation that decide whose replies it may quote."""

    head: tuple[bytes, bytes]
    begins: bool
    as_assistant: bool
    """True if the quoting message is the assistant's."""

    def may_quote(self, reply: CallRow) -> bool:
        same_head = digests(reply) == self.head
        if self.begins and (same_head or tools(reply)):
            return False  # It may be an answer that a person pasted.
        if self.begins and reply.parent_call_id is not None and reply.break_reason is None:
            return False  # It may be the end of a transcript that a summariser gets.
        return not (self.as_assistant and same_head)


class _Candidates:
    """Replies that no call continues, each of which may be a summary.

    A text that many shortened conversations repeat is compared with each reply once.
    """

    def __init__(self) -> None:
        self._summaries: list[tuple[CallRow, list[str]]] = []
        self._compared: dict[tuple[str, _Quoter], tuple[int, set[str]]] = {}
        """The number of replies that each text was compared with, and those that it quotes."""

    def add(self, call: CallRow) -> None:
        if summaries := _summaries(call):
            self._summaries.append((call, summaries))

    def quoted_by(self, call: CallRow, begins: bool) -> set[str]:
        """Return the ids of the calls whose reply ``call`` quotes as a summary.

        The quotation is in the messages of ``call``.
        """
        found: set[str] = set()
        if self._summaries:
            for role in ("user", "system", "assistant"):
                quoter = _Quoter(digests(call), begins, role == "assistant")
                for text in texts(new_messages(call), role):
                    if len(text) >= SUMMARY_LENGTH:
                        found |= self._quoted_in(text, quoter)
        return found

    def _quoted_in(self, text: str, quoter: _Quoter) -> set[str]:
        compared, found = self._compared.get((text, quoter), (0, set()))
        for call, summaries in islice(self._summaries, compared, None):
            if quoter.may_quote(call) and any(summary in text for summary in summaries):
                found.add(call.id)
        self._compared[text, quoter] = len(self._summaries), found
        return found


def _summaries(call: CallRow) -> list[str]:
    """Return the texts by which a later conversation may quote a reply, if it is a summary."""
    message = first_reply(call)
    return [] if message.tool_calls else quotable(str(message.content or ""))


def _same_question(summarisers: Sequence[CallRow], calls: Sequence[CallRow]) -> set[str]:
    """Return the ids of the calls that ask the same as a summariser.

    They have the same parent as a summariser and end with the same instruction.
    """
    asked = {(call.parent_call_id, _last_given(call)) for call in summarisers}
    if not asked:
        return set()
    return {
        call.id
        for call in calls
        if not first_reply(call).tool_calls and (call.parent_call_id, _last_given(call)) in asked
    }


def _last_given(call: CallRow) -> str:
    given = list(texts(new_messages(call), "user", "system"))
    return given[-1] if given else call.id
