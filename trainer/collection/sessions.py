"""The collection by sessions: each is trained once siblings with other rewards have ended.

Weights are published while sessions run, and tokens carry their own versions. A session is compared
with the siblings that have ended so far, those included that earlier steps have trained; it waits
while they teach nothing. So no session is thrown away for being long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bridle.errors import UsageError
from bridle.reconstruct.samples.sample import Episode
from bridle.trainer.batch.filters import newest_version, trained_tokens
from bridle.trainer.batch.prepare import prepare
from bridle.trainer.collection.background import (
    BackgroundCollector,
    Event,
    GroupEnded,
    SessionEnded,
    StartGroup,
)
from bridle.trainer.collection.collector import Collector
from bridle.trainer.collection.session_book import SessionBook
from bridle.trainer.config import GrpoConfig


def collector_of(
    start: StartGroup,
    load: Callable[[str], Episode],
    config: GrpoConfig,
    *,
    per_step: int,
    group_size: int,
) -> BackgroundCollector:
    """Return the collector that ``config.collection`` names, for ``per_step`` groups a step.

    Raise :class:`bridle.errors.UsageError` if it collects sessions on policy.
    """
    if config.collection == "groups":
        return Collector(start, load, config, per_step=per_step)
    if config.max_staleness == 0:
        raise UsageError(
            'collection = "sessions" trains sessions that ran while earlier ones were trained: '
            'set max_staleness to 1 or more, or collection to "groups"'
        )
    return SessionCollector(start, load, config, per_step=per_step, group_size=group_size)


class SessionCollector(BackgroundCollector):
    """The sessions of each step, as many as ``per_step`` groups have."""

    def __init__(
        self,
        start: StartGroup,
        load: Callable[[str], Episode],
        config: GrpoConfig,
        *,
        per_step: int,
        group_size: int,
    ) -> None:
        super().__init__(start, load, config)
        self._groups_per_step = per_step
        sessions = per_step * group_size
        limit = max(sessions, round(sessions * config.filters.refill))
        self._book = SessionBook(sessions, group_size, config.max_staleness, limit)
        self._waiting: dict[str, Episode] = {}
        self._taken: dict[int, list[Episode]] = {}
        """The sessions that steps have taken of the groups that are not done."""
        self._earlier: list[Episode] = []

    def restore(self, groups: Mapping[str, Any], step: int) -> None:
        first = {"first": step * self._groups_per_step, "taken": []}
        self._book.restore(groups or first)

    def groups(self) -> dict[str, Any]:
        with self._changed:
            return self._book.as_data()

    def earlier(self) -> Sequence[Episode]:
        return self._earlier

    def _take(self) -> list[list[Episode]] | None:
        found = None if self._book.unjudged(self._version) else self._book.ready()
        if found is None:
            return None
        self._book.take(found)
        self._earlier = [one for number in found for one in self._taken.get(number, ())]
        chosen = {number: [self._waiting.pop(one) for one in ids] for number, ids in found.items()}
        for number, episodes in chosen.items():
            self._taken.setdefault(number, []).extend(episodes)
        self._forget()
        return list(chosen.values())

    def _forget(self) -> None:
        for number in [one for one in self._taken if not self._book.is_open(one)]:
            del self._taken[number]

    def _advance(self, events: Sequence[Event]) -> list[int]:
        loaded = [
            (event.group, self._load(event.session_id))
            for event in events
            if isinstance(event, SessionEnded)
        ]
        finished = [event for event in events if isinstance(event, GroupEnded)]
        for event in finished:
            event.sessions.result()
        with self._changed:
            for number, episode in loaded:
                if self._book.end(number, episode.session.id):
                    self._waiting[episode.session.id] = episode
                else:
                    self._taken.setdefault(number, []).append(episode)
            for event in finished:
                self._book.finish(event.group)
            self._forget()
            version = self._version
            judged = {
                number: (
                    [self._waiting[one] for one in self._book.waiting(number)],
                    list(self._taken.get(number, ())),
                    self._book.is_live(number, version),
                )
                for number in self._book.unjudged(version)
            }
        verdicts = {number: self._verdict(version, *group) for number, group in judged.items()}
        begin = []
        with self._changed:
            for number, (late, live) in verdicts.items():
                self._book.judge(number, late, live, version)
            while (beginning := self._book.begin(self._steps_left)) is not None:
                begin.append(beginning)
            self._changed.notify_all()
        return begin

    def _verdict(
        self, version: int, waiting: Sequence[Episode], taken: Sequence[Episode], live: bool
    ) -> tuple[set[str], bool]:
        """Return which of ``waiting`` are too old, and whether the others teach something.

        ``live`` is true if they are known to.
        """
        late = {
            episode.session.id
            for episode in waiting
            if trained_tokens(episode)
            and version - newest_version(episode) > self._config.oldest_lag
        }
        fresh = [episode for episode in waiting if episode.session.id not in late]
        if not live and fresh:
            live = bool(prepare(fresh, version, self._judging, earlier=taken).items)
        return late, live
