"""Conversations as lines of JSON: the rules that all conversational formats share.

A line ends with a reply that no other trained call continues. A reply is trained in the first line
that holds it and that the format can express, and is context in later ones. Replies that the rules
do not train whole, and assistant messages that the harness wrote, are context everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from bridle.errors import BridleError
from bridle.reconstruct.conversation import RecordedMessage, tools, whole_conversation
from bridle.reconstruct.exports.selection import ExportReport, Selection, select
from bridle.reconstruct.samples.rules import Ruling, rulings
from bridle.reconstruct.session import LoadedSession
from bridle.store.reading.conversation import (
    IncompleteConversation,
    ReplyId,
    base,
    completes_prompt,
)
from bridle.store.reading.queries import CallRow, Reader


class Inexpressible(BridleError, ValueError):
    """A format cannot express a conversation.

    The message is the reason under which it is counted.
    """


@dataclass(frozen=True, slots=True)
class ExportedConversation:
    """A conversation of a session, and the replies in it that are trained."""

    session: LoadedSession
    leaf: ReplyId
    messages: tuple[RecordedMessage, ...]
    trained: frozenset[ReplyId]

    @property
    def id(self) -> str:
        """An id that is unique in the store.

        It consists of the last reply's call, and its choice unless it is the first.
        """
        return self.leaf.call_id + (f".{self.leaf.choice}" if self.leaf.choice else "")

    @property
    def last_call(self) -> CallRow:
        return self.session.by_id[self.leaf.call_id]

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        return tools(self.last_call)

    def is_trained(self, message: RecordedMessage) -> bool:
        return message.reply in self.trained

    def require_messages(self) -> None:
        """Raise :class:`Inexpressible` if a bare prompt was completed."""
        if completes_prompt(self.last_call):
            raise Inexpressible("prompt_without_messages")


Rows = Callable[[ExportedConversation], Iterable[Mapping[str, Any]]]
"""A format: a function that returns a conversation's rows. It raises :class:`Inexpressible`."""


def json_line(row: Mapping[str, Any]) -> bytes:
    return orjson.dumps(row) + b"\n"


def export_lines(
    reader: Reader,
    path: str | Path,
    rows: Rows,
    selection: Selection | None = None,
    *,
    encode: Callable[[Mapping[str, Any]], bytes] = json_line,
    heading: bytes = b"",
) -> ExportReport:
    """Write the selected sessions to ``path``, one session at a time.

    ``heading`` comes first, then each row as ``encode`` writes it.
    """
    selection = selection or Selection()
    report = ExportReport(Path(path))
    report.path.parent.mkdir(parents=True, exist_ok=True)
    with report.path.open("wb") as file:
        file.write(heading)
        for session in select(reader, selection, report):
            decided = rulings(session, selection.rules)
            if not any(ruling.whole for ruling in decided.values()):
                report.leave_out("session_without_trained_tokens")
            shown: set[ReplyId] = set()
            trained: set[ReplyId] = set()
            lost: dict[ReplyId, str] = {}
            count = 0
            for whole in conversations(session, decided, report):
                line = replace(whole, trained=whole.trained - shown)
                try:
                    written = list(rows(line))
                    shown |= line.trained
                    if selection.deduplicate and report.repeats(*_content(line)):
                        raise Inexpressible("duplicate")
                except Inexpressible as reason:
                    report.leave_out(str(reason))
                    lost |= dict.fromkeys(line.trained, str(reason))
                    continue
                for row in written:
                    file.write(encode(row))
                count += len(written)
                trained |= line.trained
            account(decided, trained, lost, report)
            calls = {reply.call_id for reply in trained}
            report.take_rows(count, session, (c for c in session.calls if c.id in calls))
    return report


def conversations(
    session: LoadedSession, decided: Mapping[ReplyId, Ruling], report: ExportReport
) -> Iterator[ExportedConversation]:
    """Yield the conversations of one session in the order in which their last calls began.

    Each has all of its replies that are trained whole.
    """
    whole = {reply: None for reply, ruling in decided.items() if ruling.whole}
    continued = {base(session.by_id[reply.call_id]) for reply in whole}
    for reply in whole:
        if reply in continued:
            continue
        try:
            messages = whole_conversation(session.by_id, reply)
        except IncompleteConversation:
            report.leave_out("conversation_incomplete")
            continue
        trained = frozenset(m.reply for m in messages if m.reply is not None and m.reply in whole)
        yield ExportedConversation(session, reply, messages, trained)


def account(
    decided: Mapping[ReplyId, Ruling],
    trained: set[ReplyId],
    lost: Mapping[ReplyId, str],
    report: ExportReport,
) -> None:
    """Count every sampled token of a session as trained, or as untrained by reason."""
    for reply, ruling in decided.items():
        if reply in trained:
            report.tokens += ruling.tokens
        elif ruling.whole:
            report.untrained[lost.get(reply, "conversation_incomplete")] += ruling.tokens
        else:
            excluded = ruling.reasons(0, ruling.tokens)
            report.untrained.update(excluded)
            if rest := ruling.tokens - excluded.total():
                report.untrained["reply_partly_trained"] += rest


def _content(line: ExportedConversation) -> tuple[bytes, bytes]:
    """Return a serialisation of the messages and of which are trained.

    It is the same for equal conversations, although each has tool call ids of its own.
    """
    names: dict[str, int] = {}
    messages = [[unnamed(m.message, names), line.is_trained(m)] for m in line.messages]
    last = line.last_call
    prompt = last.request_sha256 if completes_prompt(last) else ""
    whole = [messages, list(line.tools)]
    return orjson.dumps(whole, option=orjson.OPT_SORT_KEYS), prompt.encode()


def unnamed(message: Mapping[str, Any], names: dict[str, int]) -> dict[str, Any]:
    """Return a message with numbers in the place of its tool call ids.

    ``names`` has the numbers of the conversation so far, and gets those of new ids.
    """
    plain = dict(message)
    if "tool_call_id" in plain:
        plain["tool_call_id"] = names.setdefault(plain["tool_call_id"], len(names))
    if plain.get("tool_calls"):
        plain["tool_calls"] = [
            {**call, "id": names.setdefault(call.get("id", ""), len(names))}
            for call in plain["tool_calls"]
        ]
    return plain
