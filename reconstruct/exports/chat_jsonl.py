"""OpenAI's chat fine-tuning JSONL: one conversation per line, with tools.

A line ends with a reply that no other exported call continues. An assistant message that must not
be learned carries ``"weight": 0``: what the harness wrote itself, what the policy excludes, and
what an earlier line has already trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from reconstruct.exports.conversation import (
    Conversation,
    Conversations,
    IncompleteConversation,
    Reply,
    replies,
)
from reconstruct.exports.selection import ExportReport, Selection, select
from reconstruct.kinds import with_kinds
from reconstruct.policy import TrainablePolicy
from store.queries import CallRow, Reader
from store.records import CallStatus


def export_chat(
    reader: Reader, path: str | Path, selection: Selection | None = None
) -> ExportReport:
    """Writes the selected sessions to ``path``, one at a time."""
    selection = selection or Selection()
    report = ExportReport(Path(path))
    report.path.parent.mkdir(parents=True, exist_ok=True)
    with report.path.open("wb") as file:
        for session, _ in select(reader, selection, report):
            for line in chat_lines(with_kinds(reader.calls(session.id)), selection.policy, report):
                file.write(orjson.dumps(line) + b"\n")
                report.rows += 1
    return report


def chat_lines(
    calls: list[CallRow], policy: TrainablePolicy, report: ExportReport
) -> Iterator[dict[str, Any]]:
    """The lines of one session, in the order in which their last calls began."""
    conversations = Conversations(calls)
    allowed: set[Reply] = set()
    for call in calls:
        reason = _left_out(call, policy)
        if reason is not None:
            report.leave_out(reason)
        else:
            allowed.update(Reply(call.id, index) for index in range(len(replies(call))))
    continued = {conversations.base(call) for call in calls if Reply(call.id, 0) in allowed}
    trained: set[Reply] = set()
    order = {call.id: index for index, call in enumerate(calls)}
    for reply in sorted(allowed - continued, key=lambda r: (order[r.call_id], r.choice)):
        try:
            conversation = conversations.fold(reply)
        except IncompleteConversation:
            report.leave_out("conversation_incomplete")
            continue
        yield _line(conversation, allowed - trained)
        trained.update(turn.reply for turn in conversation.turns if turn.reply is not None)


def _left_out(call: CallRow, policy: TrainablePolicy) -> str | None:
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
    return None if call.message else "call_without_message"


def _line(conversation: Conversation, trainable: set[Reply]) -> dict[str, Any]:
    messages = []
    for turn in conversation.turns:
        message = dict(turn.message)
        if message.get("role") == "assistant" and turn.reply not in trainable:
            message["weight"] = 0
        messages.append(message)
    line: dict[str, Any] = {"messages": messages}
    if conversation.tools:
        line["tools"] = list(conversation.tools)
    return line
