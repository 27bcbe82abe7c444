"""Conversations as lines of JSON: what every conversational format writes, and in which order.

A line ends with a reply that no other exported call continues. A reply is trained in the first line
that holds it and that the format can say, and is context in later ones; what the harness wrote
itself, and what the policy or the selection excludes, is context everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from bridle.errors import BridleError
from bridle.reconstruct.exports.conversation import (
    Conversations,
    IncompleteConversation,
    Reply,
    Turn,
    completes_prompt,
    replies,
)
from bridle.reconstruct.exports.selection import ExportReport, Selection, call_refused, select
from bridle.reconstruct.kinds.kinds import with_kinds
from bridle.reconstruct.samples.policy import TrainablePolicy
from bridle.store.reading.queries import CallRow, Reader
from bridle.store.records import CallStatus, Reward, SessionRecord


@dataclass(frozen=True, slots=True)
class Told:
    """A conversation of a session, and which of its replies are trained."""

    session: SessionRecord
    rewards: Mapping[str, float]
    """The session's, by name."""
    leaf: Reply
    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...]
    trained: frozenset[Reply]
    calls: Mapping[str, CallRow]
    """All of the session's, by id."""

    @property
    def id(self) -> str:
        """Unique in the store: the last reply's call, with its choice where it is not the first."""
        return self.leaf.call_id + (f".{self.leaf.choice}" if self.leaf.choice else "")

    def is_trained(self, turn: Turn) -> bool:
        return turn.reply in self.trained

    def require_messages(self) -> None:
        """Raises :class:`Inexpressible` where a bare prompt was completed."""
        if completes_prompt(self.calls[self.leaf.call_id]):
            raise Inexpressible("prompt_without_messages")


class Inexpressible(BridleError, ValueError):
    """A format cannot say what a conversation says; the message is the reason it is counted by."""


Rows = Callable[[Told, Reader], Iterable[Mapping[str, Any]]]
"""A format: a conversation's lines. Raises :class:`Inexpressible`."""


def export_lines(
    reader: Reader, path: str | Path, rows: Rows, selection: Selection | None = None
) -> ExportReport:
    """Writes the selected sessions to ``path`` as JSON lines, one session at a time."""
    selection = selection or Selection()
    report = ExportReport(Path(path))
    report.path.parent.mkdir(parents=True, exist_ok=True)
    with report.path.open("wb") as file:
        for session, rewards in select(reader, selection, report):
            calls, given = with_kinds(reader.calls(session.id)), reader.rewards(session.id)
            if not calls:
                report.leave_out("session_without_calls")
            before: set[Reply] = set()
            count, written = 0, set[str]()
            for whole in tell(session, calls, rewards, given, selection, report):
                told = replace(whole, trained=whole.trained - before)
                try:
                    lines = list(rows(told, reader))
                except Inexpressible as reason:
                    report.leave_out(str(reason))
                    continue
                before |= told.trained
                if selection.deduplicate and report.repeats(*_content(told)):
                    report.leave_out("duplicate")
                    continue
                for line in lines:
                    file.write(orjson.dumps(line) + b"\n")
                count += len(lines)
                report.tokens += sum(
                    _sampled(told.calls[reply.call_id], reply, reader) for reply in told.trained
                )
                written |= {reply.call_id for reply in told.trained}
            report.take_rows(count, rewards, [call for call in calls if call.id in written])
    return report


def tell(
    session: SessionRecord,
    calls: list[CallRow],
    rewards: Mapping[str, float],
    given: list[Reward],
    selection: Selection,
    report: ExportReport,
) -> Iterator[Told]:
    """The conversations of one session, in the order in which their last calls began, each with all
    of its replies that may be trained."""
    conversations = Conversations(calls)
    allowed: set[Reply] = set()
    for call in calls:
        reason = left_out(call, selection.policy) or call_refused(call, selection, given)
        if reason is not None:
            report.leave_out(reason)
        else:
            allowed.update(Reply(call.id, index) for index in range(len(replies(call))))
    continued = {conversations.base(call) for call in calls if Reply(call.id, 0) in allowed}
    by_id = {call.id: call for call in calls}
    order = {call.id: index for index, call in enumerate(calls)}
    for reply in sorted(allowed - continued, key=lambda r: (order[r.call_id], r.choice)):
        try:
            conversation = conversations.fold(reply)
        except IncompleteConversation:
            report.leave_out("conversation_incomplete")
            continue
        held = {turn.reply for turn in conversation.turns if turn.reply is not None}
        trained = frozenset(held & allowed)
        turns, tools = conversation.turns, conversation.tools
        yield Told(session, rewards, reply, turns, tools, trained, by_id)


def left_out(call: CallRow, policy: TrainablePolicy) -> str | None:
    """Why the policy trains nothing of a call; ``None`` when it does."""
    if call.status is not CallStatus.COMPLETE and not (
        policy.partial and call.status is CallStatus.PARTIAL
    ):
        return f"call_{call.status}"
    if call.kind not in policy.kinds:
        return f"call_kind_{call.kind}"
    if policy.models is not None and call.model_served not in policy.models:
        return "call_model_frozen"
    if call.finish_reason == "length" and not policy.finish_length:
        return "call_finish_length"
    if call.constrained and not policy.constrained:
        return "call_constrained"
    return None if call.message else "call_without_message"


def _sampled(call: CallRow, reply: Reply, reader: Reader) -> int:
    """How many tokens a reply has; those of a single one are counted with its call."""
    if "choices" not in call.conversation or call.sampled_tokens is None:
        return call.sampled_tokens or 0
    return len(reader.sampled(call.id)[reply.choice].token_ids)


def _content(told: Told) -> tuple[bytes, bytes]:
    """What is said and what of it is trained; equal for equal conversations, although the ids of
    their tool calls, minted for each, differ."""
    names: dict[str, int] = {}
    said = [[_unnamed(turn.message, names), told.is_trained(turn)] for turn in told.turns]
    leaf = told.calls[told.leaf.call_id]
    prompt = (leaf.request_body_id or "") if completes_prompt(leaf) else ""
    whole = [said, list(told.tools)]
    return orjson.dumps(whole, option=orjson.OPT_SORT_KEYS), prompt.encode()


def _unnamed(message: Mapping[str, Any], names: dict[str, int]) -> dict[str, Any]:
    plain = dict(message)
    if "tool_call_id" in plain:
        plain["tool_call_id"] = names.setdefault(plain["tool_call_id"], len(names))
    if plain.get("tool_calls"):
        plain["tool_calls"] = [
            {**call, "id": names.setdefault(call.get("id", ""), len(names))}
            for call in plain["tool_calls"]
        ]
    return plain
