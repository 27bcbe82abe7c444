"""The collection by groups: each group begins, runs and ends on its own.

A thread begins groups as :class:`GroupBook` allows, loads ended ones, and judges them; the trainer
takes a step's groups when there are enough. A slow session delays its own group only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bridle.reconstruct.samples.sample import Episode
from bridle.trainer.batch.filters import newest_version, trained_tokens
from bridle.trainer.batch.prepare import prepare
from bridle.trainer.collection.background import (
    BackgroundCollector,
    Event,
    GroupEnded,
    StartGroup,
)
from bridle.trainer.collection.book import GroupBook, Verdict
from bridle.trainer.config import GrpoConfig


class Collector(BackgroundCollector):
    """The groups of each step.

    With ``max_staleness = 0`` groups run while the trainer waits for them, and every session is of
    the present version. With ``n`` the groups of up to ``n`` steps run ahead.
    """

    def __init__(
        self,
        start: StartGroup,
        load: Callable[[str], Episode],
        config: GrpoConfig,
        *,
        per_step: int,
    ) -> None:
        super().__init__(start, load, config)
        limit = max(per_step, round(per_step * config.filters.refill))
        self._book = GroupBook(per_step, config.max_staleness, limit)
        self._episodes: dict[int, list[Episode]] = {}

    def restore(self, groups: Mapping[str, Any], step: int) -> None:
        first = {"first": step * self._book.per_step, "taken": []}
        self._book.restore(groups or first)

    def groups(self) -> dict[str, Any]:
        with self._changed:
            return self._book.as_data()

    def _take(self) -> list[list[Episode]] | None:
        found = None if self._book.unjudged(self._version) else self._book.ready()
        if found is None:
            return None
        self._book.take(found)
        return [self._episodes.pop(number) for number in found]

    def _begun(self, number: int) -> None:
        self._book.begun(number, self._version)

    def _advance(self, events: Sequence[Event]) -> list[int]:
        loaded = {
            event.group: [self._load(one) for one in event.sessions.result()]
            for event in events
            if isinstance(event, GroupEnded)
        }
        with self._changed:
            self._episodes |= loaded
            for number in loaded:
                self._book.finish(number)
            version = self._version
            judged = {number: self._episodes[number] for number in self._book.unjudged(version)}
        verdicts = {number: self._verdict(group, version) for number, group in judged.items()}
        begin = []
        with self._changed:
            for number, verdict in verdicts.items():
                self._book.judge(number, verdict, version)
            while (beginning := self._next()) is not None:
                begin.append(beginning)
            self._changed.notify_all()
        return begin

    def _next(self) -> int | None:
        return self._book.begin(self._version, self._steps_left, self._training)

    def _verdict(self, group: Sequence[Episode], version: int) -> Verdict:
        late = [
            version - newest_version(episode) > self._config.oldest_lag
            for episode in group
            if trained_tokens(episode)
        ]
        if late and all(late):
            return "late"
        if self._config.filters.refill > 1 and not prepare(group, version, self._judging).items:
            return "spent"
        return "live"
