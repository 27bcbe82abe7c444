"""Recorded traffic as a timed trace that AIPerf replays (``mooncake_trace``): a request per line.

A line is one call as a chat request: its whole conversation, its tools, the number of tokens that
were sampled, and the milliseconds since the first session of the file began. Calls of one session
have one ``session_id``. All calls are written, whatever they train.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from bridle.reconstruct.conversation import tools, whole_conversation
from bridle.reconstruct.exports.formats import ExportFormat
from bridle.reconstruct.exports.lines import json_line
from bridle.reconstruct.exports.selection import ExportReport, Selection, select
from bridle.reconstruct.session import LoadedSession
from bridle.store.reading.conversation import IncompleteConversation, ReplyId, completes_prompt
from bridle.store.reading.queries import CallRow, Reader


def write_trace(
    reader: Reader, path: str | Path, selection: Selection | None, _builder: str
) -> ExportReport:
    """Write the calls of the selected sessions, and count those that cannot be sent again."""
    report = ExportReport(Path(path))
    report.path.parent.mkdir(parents=True, exist_ok=True)
    began: float | None = None
    with report.path.open("wb") as file:
        for session in select(reader, selection or Selection(), report):
            if began is None:
                began = min(session.record.created_at, session.calls[0].started_at)
            count = 0
            for call in session.calls:
                row = request(session, call, began, report)
                if row is not None:
                    file.write(json_line(row))
                    count += 1
            report.take_rows(count, session, ())
    return report


def request(
    session: LoadedSession, call: CallRow, began: float, report: ExportReport
) -> dict[str, Any] | None:
    """Return a call as a line of the trace, or ``None`` if it cannot be sent again."""
    if call.replayed_call_id is not None:
        report.leave_out("answered_from_the_record")
    elif not call.replies or call.conversation is None:
        report.leave_out("call_without_reply")
    elif completes_prompt(call):
        report.leave_out("prompt_without_messages")
    else:
        try:
            *asked, _reply = whole_conversation(session.by_id, ReplyId(call.id, 0))
        except IncompleteConversation:
            report.leave_out("conversation_incomplete")
            return None
        line: dict[str, Any] = {
            "session_id": session.record.id,
            "timestamp": round(1000 * max(0.0, call.started_at - began), 3),
            "messages": [dict(one.message) for one in asked],
        }
        if given := tools(call):
            line["tools"] = list(given)
        if call.sampled_tokens:
            line["output_length"] = call.sampled_tokens
        return line
    return None


TRACE: Final = ExportFormat(write_trace)
