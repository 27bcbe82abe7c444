"""Preferences between the sessions of a group, in the forms that TRL's trainers take.

Sessions of one group, or of one task, are compared by their number. ``preference`` has rows for
``DPOTrainer``: where sessions had one conversation so far and then differ, the reply of the better
ones is chosen and that of the worse ones rejected. The value of a reply is the mean number of the
sessions that gave it, so that sessions that re-enter a recorded one are compared at the call from
which they differ. ``preference-labels`` has rows for ``KTOTrainer``: each trained reply, with the
label whether its session is above the mean of its group.

A completion is one reply, so that no output of a tool is trained. The replies that count are those
that the rules train whole, as in the other conversational formats.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import orjson

from bridle.reconstruct.exports.formats import ExportFormat
from bridle.reconstruct.exports.lines import (
    ExportedConversation,
    account,
    conversations,
    json_line,
    unnamed,
)
from bridle.reconstruct.exports.selection import ExportReport, Pairing, Selection, records, select
from bridle.reconstruct.exports.trl import plain_message, tool_schemas
from bridle.reconstruct.rewards import CountedRewards
from bridle.reconstruct.samples.rules import Ruling, rulings
from bridle.reconstruct.session import LoadedSession
from bridle.store.reading.conversation import ReplyId, completes_prompt
from bridle.store.reading.queries import Reader
from bridle.store.records import SessionRecord


@dataclass(frozen=True, slots=True)
class ComparedReply:
    """A trained reply of a session, with the conversation before it."""

    session: str
    number: float
    """The number of the session."""
    reply: ReplyId
    before: bytes
    """A digest of the tools and of the messages before the reply, without ids of tool calls."""
    content: bytes
    """A digest of the reply itself."""
    exported: ExportedConversation
    index: int

    def prompt(self) -> dict[str, Any]:
        """Return the columns of a row that two replies to one conversation share."""
        messages = [plain_message(one.message) for one in self.exported.messages[: self.index]]
        return {"prompt": messages, **tool_schemas(self.exported)}

    def completion(self) -> list[dict[str, Any]]:
        return [plain_message(self.exported.messages[self.index].message)]


Preferences = Callable[
    [Sequence[ComparedReply]], Iterator[tuple[dict[str, Any], tuple[ComparedReply, ...]]]
]
"""A function from the replies of a group to rows, each with the replies that it trains."""


def pairs(
    replies: Sequence[ComparedReply], pairing: Pairing = "replies"
) -> Iterator[tuple[dict[str, Any], tuple[ComparedReply, ...]]]:
    """Yield ``{"prompt": […], "chosen": […], "rejected": […], "tools": "…"}``.

    Which replies to one conversation are paired is :attr:`Selection.pairs`.
    """
    by_prompt: dict[bytes, dict[bytes, list[ComparedReply]]] = defaultdict(dict)
    for one in replies:
        by_prompt[one.before].setdefault(one.content, []).append(one)
    for different in by_prompt.values():
        for better, worse in _paired(list(different.values()), pairing):
            sides = {"chosen": better.completion(), "rejected": worse.completion()}
            yield {**better.prompt(), **sides}, (better, worse)


def _paired(
    different: Sequence[Sequence[ComparedReply]], pairing: Pairing
) -> Iterator[tuple[ComparedReply, ComparedReply]]:
    """Yield pairs of a better and a worse one of the replies to one conversation.

    Each of ``different`` has the equal replies of some sessions.
    """
    ranked = sorted(((_value(equal), equal) for equal in different), key=_first, reverse=True)
    if pairing == "sessions":
        ranked = [(value, [one]) for value, equal in ranked for one in equal]
    half = zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False)
    for (value, better), (other, worse) in combinations(ranked, 2) if pairing == "all" else half:
        if value > other:
            yield better[0], worse[0]


def _first(valued: tuple[float, Sequence[ComparedReply]]) -> float:
    return valued[0]


def _value(replies: Sequence[ComparedReply]) -> float:
    return fmean(one.number for one in replies)


def labels(
    replies: Sequence[ComparedReply],
) -> Iterator[tuple[dict[str, Any], tuple[ComparedReply, ...]]]:
    """Yield ``{"prompt": […], "completion": […], "label": true, "tools": "…"}``."""
    middle = fmean({one.session: one.number for one in replies}.values())
    for one in replies:
        if one.number != middle:
            row = {"completion": one.completion(), "label": one.number > middle}
            yield {**one.prompt(), **row}, (one,)


def _export_groups(
    reader: Reader, path: str | Path, rows: Preferences, selection: Selection
) -> ExportReport:
    """Write the rows of each group of the selected sessions, one group at a time."""
    report = ExportReport(Path(path))
    report.path.parent.mkdir(parents=True, exist_ok=True)
    counted = CountedRewards(reader, selection.reward_sources)
    with report.path.open("wb") as file:
        for ids in _groups(reader, selection):
            chosen = replace(selection, sessions=ids)
            sessions = [
                _Session(one, rulings(one, selection.rules), counted)
                for one in select(reader, chosen, report)
            ]
            written: dict[str, int] = defaultdict(int)
            trained: dict[str, set[ReplyId]] = defaultdict(set)
            for row, replies in _rows(sessions, rows, report):
                if selection.deduplicate and report.repeats(*_content(row, replies)):
                    report.leave_out("duplicate")
                    continue
                file.write(json_line(row))
                written[replies[0].session] += 1
                for one in replies:
                    trained[one.session].add(one.reply)
            for each in sessions:
                each.count(written[each.id], trained[each.id], report)
    return report


def _content(row: Mapping[str, Any], replies: Iterable[ComparedReply]) -> Iterator[bytes]:
    """Yield the parts of a row by which it repeats another, whatever the ids of tool calls."""
    yield str(row.get("label")).encode()
    for one in replies:
        yield one.before
        yield one.content


def _rows(
    sessions: Sequence[_Session], rows: Preferences, report: ExportReport
) -> Iterator[tuple[dict[str, Any], tuple[ComparedReply, ...]]]:
    replies = [reply for one in sessions for reply in one.replies(report)]
    return rows(replies) if replies else iter(())


def _groups(reader: Reader, selection: Selection) -> Iterable[tuple[str, ...]]:
    """Return the ids of sessions that are compared with each other."""
    members: dict[Hashable, list[str]] = defaultdict(list)
    for record in records(reader, selection):
        members[_group_of(record)].append(record.id)
    return map(tuple, members.values())


def _group_of(record: SessionRecord) -> Hashable:
    if record.group_id is not None or record.task_id is None:
        return record.group_id or record.id
    return record.task_suite, record.task_split, record.task_id


@dataclass(frozen=True, slots=True)
class _Session:
    """A session of a group, with the rules' decision about its replies."""

    loaded: LoadedSession
    decided: dict[ReplyId, Ruling]
    counted: CountedRewards

    @property
    def id(self) -> str:
        return self.loaded.record.id

    def replies(self, report: ExportReport) -> Iterator[ComparedReply]:
        """Yield the trained replies, each once."""
        number = self.counted.number(self.loaded.record.run_id, self.loaded.all_rewards)
        if number is None:
            report.leave_out("session_without_reward")
            return
        shown: set[ReplyId] = set()
        for exported in conversations(self.loaded, self.decided, report):
            if completes_prompt(exported.last_call):
                report.leave_out("prompt_without_messages")
                continue
            for one in _compared(exported, number):
                if one.reply not in shown:
                    shown.add(one.reply)
                    yield one

    def count(self, rows: int, trained: set[ReplyId], report: ExportReport) -> None:
        """Count the session's rows, and the fate of its tokens."""
        whole = {reply for reply, ruling in self.decided.items() if ruling.whole}
        account(self.decided, trained, dict.fromkeys(whole - trained, "not_compared"), report)
        calls = {reply.call_id for reply in trained}
        report.take_rows(rows, self.loaded, (c for c in self.loaded.calls if c.id in calls))


def _compared(exported: ExportedConversation, number: float) -> Iterator[ComparedReply]:
    names: dict[str, int] = {}
    before = hashlib.sha256(orjson.dumps(list(exported.tools), option=orjson.OPT_SORT_KEYS))
    for index, entry in enumerate(exported.messages):
        plain = orjson.dumps(unnamed(entry.message, names), option=orjson.OPT_SORT_KEYS)
        content = hashlib.sha256(plain).digest()
        if entry.reply is not None and exported.is_trained(entry):
            session = exported.session.record.id
            yield ComparedReply(
                session, number, entry.reply, before.digest(), content, exported, index
            )
        before.update(content)


def _of(rows: Callable[[Selection], Preferences]) -> ExportFormat:
    def write(
        reader: Reader, path: str | Path, selection: Selection | None, _: str
    ) -> ExportReport:
        chosen = selection or Selection()
        return _export_groups(reader, path, rows(chosen), chosen)

    return ExportFormat(write)


PAIRS: Final = _of(lambda selection: partial(pairs, pairing=selection.pairs))
LABELS: Final = _of(lambda _: labels)
