"""The selection of sessions for an export, and the report of what was written and left out."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal

from bridle.reconstruct.conditions import Condition, session_meets
from bridle.reconstruct.rewards import CountedRewards, session_rewards
from bridle.reconstruct.samples.rules import DEFAULT_RULES, SampleRules
from bridle.reconstruct.session import LoadedSession
from bridle.reconstruct.tree import BrokenTree
from bridle.store.reading.queries import CallRow, Reader
from bridle.store.records import SessionRecord
from bridle.store.reward import Reward
from bridle.store.schema.database import in_pieces

ExportPart = Literal["train", "eval"]
Pairing = Literal["replies", "sessions", "all"]


@dataclass(frozen=True, slots=True)
class Selection:
    """Conditions on sessions, all of which must hold; ``None`` means any."""

    sessions: tuple[str, ...] = ()
    """Ids of the only sessions that are considered; empty for all."""
    run: str | None = None
    harness: str | None = None
    split: str | None = None
    """The split of the session's task."""
    outcome: str | None = None
    """The session's outcome; ``open`` for sessions that are not sealed."""
    reward: str | None = None
    """The name of the reward to which the two bounds apply. If ``None``, they apply to the
    session's number (:mod:`bridle.reconstruct.rewards`)."""
    min_reward: float | None = None
    max_reward: float | None = None
    reward_sources: tuple[str, ...] | None = None
    """The sources whose rewards count. If ``None``, those that the sessions' runs state
    (:class:`bridle.reconstruct.rewards.CountedRewards`)."""
    rules: SampleRules = DEFAULT_RULES
    """The rules that decide which replies of the sessions are trained; the others stay as
    context."""
    where: tuple[Condition, ...] = ()
    """Conditions on columns of the session, its task, labels and rewards; for calls see
    ``rules``."""
    sql: str | None = None
    """An SQL condition on the columns of ``sessions``."""
    deduplicate: bool = False
    """Leave out rows with the content of an earlier one."""
    pairs: Pairing = "replies"
    """The pairs of ``preference`` at one conversation. ``replies`` pairs the different replies, the
    best with the worst, the second best with the second worst, and so on. ``sessions`` does the
    same with the reply of each session, so that a reply counts as often as it was given. ``all``
    pairs each of the different replies with every worse one."""
    facts: bool = False
    """Add what the engine and the trainer reported of each token to files of tokens: the ids that
    it was drawn from, the experts behind it, the trainer's logprob and the entropy
    (:data:`bridle.reconstruct.tables.FACT_COLUMNS`)."""
    part: ExportPart | None = None
    """The part of the split by ``eval_share`` whose tasks are taken; ``None`` for both."""
    eval_share: float = 0.0

    def __post_init__(self) -> None:
        for condition in self.where:
            if condition.of == "call":
                raise ValueError(f"{condition}: a condition on calls is one of the rules")

    def as_data(self) -> dict[str, Any]:
        """Return the fields that are set as JSON-ready data, for the data card."""
        plain = {known.name: getattr(self, known.name) for known in fields(self)}
        plain |= {"where": [str(condition) for condition in self.where]}
        given = {name: value for name, value in plain.items() if value != _DEFAULTS[name]}
        return given | {"rules": self.rules.as_data()}


_DEFAULTS: Final = {known.name: known.default for known in fields(Selection)} | {"where": []}


@dataclass(slots=True)
class ExportReport:
    """The counts of what an export wrote and left out.

    Every sampled token of the taken sessions is in ``tokens`` or in ``untrained``.
    """

    path: Path
    sessions: int = 0
    rows: int = 0
    tokens: int = 0
    """Tokens that a trainer of the file trains, counted as they were sampled."""
    untrained: Counter[str] = field(default_factory=Counter)
    """Sampled tokens that no row trains, by reason."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Numbers of sessions, conversations and rows by reason."""
    taken: dict[str, Counter[str]] = field(default_factory=dict)
    """The taken sessions by run, task, harness and outcome; their calls by model and version."""
    rewards: dict[str, list[float]] = field(default_factory=dict)
    """Rewards of the sessions that have a row, by name."""
    session_ids: list[str] = field(default_factory=list)
    account: dict[str, int] = field(default_factory=dict)
    """The fates in the store of the sampled tokens of the taken sessions, whatever the file holds
    of them: the table of ``bridle audit``."""
    _digests: set[bytes] = field(default_factory=set)

    def leave_out(self, reason: str) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + 1

    def take(self, session: SessionRecord) -> None:
        self.sessions += 1
        self.session_ids.append(session.id)
        for name in ("run_id", "task_id", "harness", "outcome"):
            value = getattr(session, name)
            if value is not None:
                self.taken.setdefault(name, Counter())[value] += 1

    def take_rows(self, count: int, session: LoadedSession, trained: Iterable[CallRow]) -> None:
        """Count a session's rows and, if it has any, its rewards and its trained calls."""
        if not count:
            return
        self.rows += count
        for name, reward in session.rewards.items():
            self.rewards.setdefault(name, []).append(reward)
        for call in trained:
            model = call.model_served or call.model_requested
            self.taken.setdefault("model", Counter())[model] += 1
            if call.version_start is not None:
                self.taken.setdefault("policy_version", Counter())[str(call.version_start)] += 1

    def repeats(self, *content: bytes) -> bool:
        """Record a row's content. Return whether an earlier row had the same."""
        digest = hashlib.sha256()
        for piece in content:
            digest.update(len(piece).to_bytes(8, "big") + piece)
        known = digest.digest() in self._digests
        self._digests.add(digest.digest())
        return known


def select(reader: Reader, selection: Selection, report: ExportReport) -> Iterator[LoadedSession]:
    """Yield the sessions to export; refused ones are counted in the report."""
    counted = CountedRewards(reader, selection.reward_sources)

    def wanted(record: SessionRecord, rewards: Sequence[Reward]) -> bool:
        if selection.part not in (None, part_of(record, selection.eval_share)):
            return False
        reason = _refused(counted, reader, record, rewards, selection)
        if reason is not None:
            report.leave_out(reason)
        return reason is None

    for session in LoadedSession.stream(reader, records(reader, selection), wanted, counted):
        try:
            has_calls = bool(session.tree.calls)
        except BrokenTree:
            report.leave_out("session_broken")
            continue
        report.take(session.record)
        if has_calls:
            yield session
        else:
            report.leave_out("session_without_calls")


def records(reader: Reader, selection: Selection) -> Iterator[SessionRecord]:
    """Yield the sessions that meet the conditions on columns, oldest first.

    Sessions that are named are read by their ids.
    """
    conditions: dict[str, Any] = {
        "run": selection.run,
        "harness": selection.harness,
        "split": selection.split,
        "outcome": selection.outcome,
        "where": selection.sql,
    }
    if not selection.sessions:
        yield from reader.sessions(**conditions)
        return
    pieces = in_pieces(sorted(set(selection.sessions)))
    found = [one for some in pieces for one in reader.sessions(sessions=some, **conditions)]
    yield from sorted(found, key=lambda one: (one.created_at, one.id))


def part_of(session: SessionRecord, eval_share: float) -> ExportPart:
    """Return the part to which a session's task belongs, whatever else the store holds.

    A session without a task is assigned by its group, and without a group by its own id.
    """
    key = session.task_id or session.group_id or session.id
    place = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64
    return "eval" if place < eval_share else "train"


def _refused(
    counted: CountedRewards,
    reader: Reader,
    session: SessionRecord,
    rewards: Sequence[Reward],
    selection: Selection,
) -> str | None:
    named = session_rewards(rewards)
    if selection.reward is None:
        value = counted.number(session.run_id, rewards)
    else:
        value = named.get(selection.reward)
    low, high = selection.min_reward, selection.max_reward
    if value is None:
        if (low, high) != (None, None):
            return "session_without_reward"
    elif (low is not None and value < low) or (high is not None and value > high):
        return "session_reward_out_of_bounds"
    task = reader.task_of(session) if any(c.of == "task" for c in selection.where) else None
    met = session_meets(selection.where, session, task, named)
    return None if met else "session_condition"
