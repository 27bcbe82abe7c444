"""The loader of recorded sessions, for every reader from exports to the trainer.

A :class:`LoadedSession` holds the calls and spans of one moment, the calls' kinds, and the rewards.
Many sessions are streamed: the database is queried for ``AT_ONCE`` of them together, and no more
than these are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import islice
from typing import Final, NamedTuple, Self

from bridle.reconstruct.breaks import explained
from bridle.reconstruct.conversation import holds_media, new_messages
from bridle.reconstruct.kinds.kinds import Verdict, classify, with_kinds
from bridle.reconstruct.repeats import repetitions, with_repetitions
from bridle.reconstruct.rewards import (
    Aggregation,
    CountedRewards,
    findings_in,
    session_rewards,
    turn_rewards,
)
from bridle.reconstruct.tree import BrokenTree, SessionTree
from bridle.store.errors import NotFound
from bridle.store.reading.conversation import base
from bridle.store.reading.damage import DamagedRows, RowDamage
from bridle.store.reading.queries import CallRow, DamagedSession, Reader, SpanRow
from bridle.store.records import SessionRecord, SpanKind
from bridle.store.reward import Reward

AT_ONCE: Final = 16
"""Sessions per query."""


class Damage(NamedTuple):
    """Stored values of a session that cannot be read."""

    rule: str
    """The audit's word for it: ``row_unreadable``, ``span_damaged`` or ``texts_damaged``."""
    detail: str


@dataclass(frozen=True, eq=False)
class LoadedSession:
    """A session as it was at one moment."""

    reader: Reader
    record: SessionRecord
    calls: Sequence[CallRow]
    """Calls with their kinds and the reasons of their breaks, in the order of their start."""
    spans: Sequence[SpanRow]
    """Spans in no particular order."""
    all_rewards: Sequence[Reward] = ()
    """Rewards and findings of the session, its calls and turns, oldest first."""
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    """The reason for each call's kind, by call id; empty if the calls' texts are damaged."""
    damage: tuple[Damage, ...] = ()

    @classmethod
    def load(cls, reader: Reader, session_id: str) -> Self:
        """Load one session. Raise :class:`bridle.store.errors.NotFound` if there is none."""
        return next(cls.stream(reader, [reader.session(session_id)]))

    @classmethod
    def stream(
        cls,
        reader: Reader,
        records: Iterable[SessionRecord],
        wanted: Callable[[SessionRecord, Sequence[Reward]], bool] | None = None,
        counted: CountedRewards | None = None,
    ) -> Iterator[Self]:
        """Load sessions in the order of their records.

        ``counted`` leaves out the rewards that do not count. ``wanted`` may refuse a session by its
        rewards before its calls are read.
        """
        waiting = iter(records)
        while batch := list(islice(waiting, AT_ONCE)):
            damage: dict[str, list[RowDamage]] = {}
            rewards = reader.rewards_of([record.id for record in batch], damage)
            if counted is not None:
                rewards = {one.id: counted.of(one, rewards[one.id]) for one in batch}
            if wanted is not None:
                batch = [one for one in batch if wanted(one, rewards[one.id])]
            found = _recorded(reader, [record.id for record in batch])
            for record in batch:
                calls, spans, damaged = found.pop(record.id)
                own = record.damage if isinstance(record, DamagedSession) else ()
                unread = tuple(_unreadable(each) for each in (*own, *damage.get(record.id, ())))
                yield cls._classified(
                    reader, record, calls, spans, (*unread, *damaged), rewards[record.id]
                )

    @classmethod
    def _classified(
        cls,
        reader: Reader,
        record: SessionRecord,
        calls: list[CallRow],
        spans: list[SpanRow],
        damage: tuple[Damage, ...],
        rewards: list[Reward],
    ) -> Self:
        if not damage:
            # A tree that contradicts itself explains nothing, and ``tree`` raises for it.
            with suppress(KeyError, ValueError):
                calls = explained(calls, [row.span for row in spans])
        try:
            repeated = repetitions(calls)
            calls = with_repetitions(calls, repeated)
            verdicts = classify(calls, repeated)
        except (NotFound, ValueError) as error:
            damage = (*damage, Damage("texts_damaged", str(error)))
            return cls(reader, record, calls, spans, rewards, {}, damage)
        kinds = with_kinds(calls, verdicts)
        return cls(reader, record, kinds, spans, rewards, verdicts, damage)

    @property
    def id(self) -> str:
        return self.record.id

    @cached_property
    def by_id(self) -> Mapping[str, CallRow]:
        """The calls by their ids, in the order of their start."""
        return {call.id: call for call in self.calls}

    @cached_property
    def tree(self) -> SessionTree:
        """The verified token tree.

        Raises :class:`bridle.reconstruct.tree.BrokenTree`, also for stored values that are damaged.
        """
        if self.damage:
            raise BrokenTree(self.damage[0].detail)
        return SessionTree(self.id, self.calls, self.spans)

    @cached_property
    def sampled(self) -> Mapping[str, Sequence[SpanRow]]:
        """The sampled spans of each call that has some, in the order of their choices."""
        found: dict[str, list[SpanRow]] = {}
        for row in self.spans:
            if row.span.kind is SpanKind.SAMPLED:
                found.setdefault(row.span.call_id, []).append(row)
        for rows in found.values():
            if len(rows) > 1:
                rows.sort(key=lambda row: row.choice or 0)
        return found

    @cached_property
    def with_media(self) -> frozenset[str]:
        """The ids of the calls whose conversation holds a part that is not text.

        The part is in new messages or in those of the calls that they continue.
        """
        found: set[str] = set()
        for call in self.calls:
            continued = base(call)
            inherited = continued is not None and continued.call_id in found
            if inherited or any(map(holds_media, new_messages(call))):
                found.add(call.id)
        return frozenset(found)

    @property
    def captured(self) -> int:
        """Sampled tokens of all calls, as the calls count them."""
        return sum(call.sampled_tokens or 0 for call in self.calls)

    @cached_property
    def rewards(self) -> dict[str, float]:
        """The rewards of the session as a whole, by name; the latest of each name."""
        return session_rewards(self.all_rewards)

    @cached_property
    def turn_rewards(self) -> Callable[[str], dict[str, float]]:
        """A cached function that returns the latest rewards of a name.

        ``turn_rewards(name)`` returns the latest reward of this name for each call that has one.
        """
        return cache(lambda name: turn_rewards(self.all_rewards, name))

    @cached_property
    def findings(self) -> list[Reward]:
        """The findings about the session."""
        return findings_in(self.all_rewards)

    def reward(self, aggregation: Aggregation | None = None) -> float | None:
        """Return the session's number by ``aggregation``, or by the rules of its run.

        If the aggregation names no sources, those of the run count, or the verifier's and the
        operator's for a session of no run. Return ``None`` if there is no number.
        """
        stated = CountedRewards(self.reader).aggregation(self.record.run_id)
        chosen = aggregation or stated
        if chosen.sources is None:
            chosen = replace(chosen, sources=stated.sources)
        return chosen.value(self.all_rewards)

    def request(self, call: CallRow) -> bytes:
        """Return the client's request, byte for byte."""
        return self.reader.request_body(call.id)

    def response(self, call: CallRow) -> bytes | None:
        """Return the reply that the client received, byte for byte.

        The result is ``None`` if there is none.
        """
        return None if call.response_sha256 is None else self.reader.response_body(call.id)


_Recorded = tuple[list[CallRow], list[SpanRow], tuple[Damage, ...]]


def _unreadable(damage: RowDamage) -> Damage:
    return Damage("row_unreadable", str(damage))


def _damaged(reader: Reader, session_id: str, error: ValueError) -> _Recorded:
    """Return the calls of a session whose spans are damaged, or none if its calls are damaged."""
    rows = error.damage if isinstance(error, DamagedRows) else ()
    if all(row.table == "spans" for row in rows):
        damage = [Damage("span_damaged", str(error))]
    else:
        damage = [_unreadable(row) for row in rows]
    try:
        return reader.calls(session_id), [], tuple(damage)
    except ValueError:
        return [], [], tuple(damage)


def _recorded(reader: Reader, ids: Sequence[str]) -> dict[str, _Recorded]:
    """Return calls and spans by session id. A session whose spans are damaged has no spans."""
    try:
        calls, spans = reader.recorded_of(ids)
    except ValueError as error:
        if len(ids) > 1:
            return {key: _recorded(reader, [key])[key] for key in ids}
        return {ids[0]: _damaged(reader, ids[0], error)}
    return {key: (calls.pop(key), spans.pop(key), ()) for key in ids}
