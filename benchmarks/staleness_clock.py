"""Sessions that take time while a policy trains, for the benchmark of staleness.

A session takes a lognormal time (σ = 1) in units of a middling session's. Its turns are sampled one
after the other over that time, each with the weights of its moment. The book that begins sessions
and says which a step takes is the trainer's; the clock is virtual, and a step takes no time on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

import numpy as np

from bridle.reconstruct.samples.sample import Episode
from bridle.trainer.batch.prepare import prepare
from bridle.trainer.collection.session_book import SessionBook
from bridle.trainer.config import GrpoConfig

TICK: Final = 0.1
"""The grain of the clock."""

State = TypeVar("State")


@dataclass(slots=True)
class _Running(Generic[State]):
    group: int
    state: State
    turn_s: float
    due: float = 0.0
    """The time at which its next turn ends."""


@dataclass(slots=True)
class Clock(Generic[State]):
    """The sessions of one run.

    ``begin`` returns the states of a new group's sessions, and ``turn`` samples the next turn of
    some of them with the present weights. ``episode`` returns a session that has ended, or ``None``
    while it has not.
    """

    book: SessionBook
    config: GrpoConfig
    slots: int
    turns: int
    rng: np.random.Generator
    begin: Callable[[int], list[State]]
    turn: Callable[[list[State], int], None]
    episode: Callable[[State], Episode | None]
    now: float = 0.0
    _queue: list[_Running[State]] = field(default_factory=list)
    _running: list[_Running[State]] = field(default_factory=list)
    _left: dict[int, int] = field(default_factory=dict)
    _waiting: dict[str, Episode] = field(default_factory=dict)
    _taken: dict[int, list[Episode]] = field(default_factory=dict)

    def step(self, version: int, steps_left: int) -> tuple[list[Episode], list[Episode]]:
        """Let time pass until a step's sessions have ended.

        Return them, and their siblings that earlier steps have trained.
        """
        while True:
            self._admit(steps_left)
            self._judge(version)
            if (chosen := self.book.ready()) is not None:
                break
            self.now += TICK
            for number, episode in self._advanced(version):
                self._end(number, episode)
        self.book.take(chosen)
        earlier = [one for number in chosen for one in self._taken.get(number, ())]
        taken = {number: [self._waiting.pop(one) for one in ids] for number, ids in chosen.items()}
        for number, episodes in taken.items():
            self._taken.setdefault(number, []).extend(episodes)
        return [one for episodes in taken.values() for one in episodes], earlier

    def _admit(self, steps_left: int) -> None:
        while (number := self.book.begin(steps_left)) is not None:
            group = [
                _Running(number, state, self.rng.lognormal() / self.turns)
                for state in self.begin(number)
            ]
            self._left[number] = len(group)
            self._queue += group
        while self._queue and len(self._running) < self.slots:
            session = self._queue.pop(0)
            session.due = self.now + session.turn_s
            self._running.append(session)

    def _advanced(self, version: int) -> Iterator[tuple[int, Episode]]:
        """Sample the turns that are due, and yield the sessions that end with them."""
        due = [session for session in self._running if session.due <= self.now]
        self.turn([session.state for session in due], version)
        for session in due:
            session.due += session.turn_s
            ended = self.episode(session.state)
            if ended is not None:
                self._running.remove(session)
                yield session.group, ended

    def _end(self, number: int, episode: Episode) -> None:
        self._waiting[episode.session.id] = episode
        self.book.end(number, episode.session.id)
        self._left[number] -= 1
        if not self._left[number]:
            self.book.finish(number)

    def _judge(self, version: int) -> None:
        for number in self.book.unjudged(version):
            waiting = [self._waiting[one] for one in self.book.waiting(number)]
            taken = self._taken.get(number, [])
            live = self.book.is_live(number, version)
            live = live or bool(prepare(waiting, version, self.config, earlier=taken).items)
            self.book.judge(number, (), live, version)


def in_turn(sessions: int, rng: np.random.Generator) -> float:
    """Return the time of a step whose sessions all run at once and are all waited for."""
    return float(rng.lognormal(size=sessions).max())
