"""A thread that runs groups of sessions beside a trainer that waits for a step's sessions."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

from bridle.reconstruct.samples.sample import Episode
from bridle.store.records import SessionRecord
from bridle.trainer.config import GrpoConfig
from bridle.trainer.credit import ADVANTAGES, is_scoring


class Collect(Protocol):
    def __call__(self, step: int, version: int) -> Sequence[Episode]:
        """Return the sessions that ``step`` trains; ``version`` is the policy's present version."""


class GroupSource(Protocol):
    def groups(self) -> Mapping[str, Any]:
        """Return what a checkpoint keeps of the groups that steps have taken."""

    def earlier(self) -> Sequence[Episode]:
        """Return the siblings of the step's sessions that earlier steps have trained."""


class StartGroup(Protocol):
    def __call__(
        self, number: int, begun: Callable[[], None], ended: Callable[[str], None]
    ) -> Future[Sequence[str]]:
        """Run the sessions of group ``number``; the future gives their ids when all have ended.

        Call ``begun`` when a session begins, and ``ended`` with its id when it has ended, both from
        any thread.
        """


@dataclass(frozen=True, slots=True)
class SessionEnded:
    group: int
    session_id: str


@dataclass(frozen=True, slots=True)
class GroupEnded:
    group: int
    sessions: Future[Sequence[str]]


Event = SessionEnded | GroupEnded


class BackgroundCollector(ABC):
    """The sessions of each step, collected by a thread; a :class:`Collect`.

    The thread begins groups as the book of a subclass allows, loads and judges what has ended, and
    wakes the trainer. Leaving the context ends the thread but not the sessions, which their starter
    ends.
    """

    def __init__(
        self, start: StartGroup, load: Callable[[str], Episode], config: GrpoConfig
    ) -> None:
        self._start = start
        self._load = load
        self._config = config
        self._judging = config
        scores = is_scoring(ADVANTAGES.get(config.advantages.baseline))
        if config.distillation.teaches or scores:
            # They make groups of equal rewards teach too, and are asked when they are trained.
            filters = replace(config.filters, drop_zero_variance=False)
            advantages = replace(config.advantages, baseline="grpo") if scores else None
            self._judging = replace(
                config, filters=filters, advantages=advantages or config.advantages
            )
        self._changed = threading.Condition()
        self._events: list[Event] = []
        self._version = 0
        self._steps_left = 0
        self._failure: BaseException | None = None
        self._stirred = self._closing = self._training = False
        self._thread = threading.Thread(target=self._work, name="collect", daemon=True)

    def __enter__(self) -> BackgroundCollector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    @abstractmethod
    def restore(self, groups: Mapping[str, Any], step: int) -> None:
        """Continue after the groups that a checkpoint after ``step`` steps has trained."""

    @abstractmethod
    def groups(self) -> dict[str, Any]:
        """Return the state that a checkpoint keeps for :meth:`restore`."""

    def earlier(self) -> Sequence[Episode]:
        """Return the siblings of the step's sessions that earlier steps have trained."""
        return ()

    @abstractmethod
    def _take(self) -> list[list[Episode]] | None:
        """Take a step's sessions, by group, or return ``None`` if too few have ended."""

    @abstractmethod
    def _advance(self, events: Sequence[Event]) -> list[int]:
        """Load and judge what has ended. Return the groups to begin. Called without the lock."""

    def _begun(self, number: int) -> None:  # noqa: B027 - most books count no beginnings
        """Record, with the lock held, that a session of a group begins."""

    def __call__(self, step: int, version: int) -> list[Episode]:
        """Wait for the step's sessions and return them.

        Raise any error of running or loading one.
        """
        with self._changed:
            self._version, self._steps_left = version, self._config.steps - step
            self._training = False
            self._stir()
            while (taken := self._settled()) is None:
                self._changed.wait()
            self._steps_left -= 1
            self._training = True
            self._stir()
        return in_order(taken)

    def published(self, version: int) -> None:
        """Record that the engine serves ``version`` from now on.

        Record also that the next step trains it.
        """
        with self._changed:
            self._version = version
            self._training = self._config.max_staleness == 0
            self._stir()

    def _settled(self) -> list[list[Episode]] | None:
        if self._failure is not None:
            raise self._failure
        return None if self._stirred or self._events else self._take()

    def _stir(self) -> None:
        self._stirred = True
        self._changed.notify_all()

    def _happened(self, event: Event) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    # -- the thread ------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._stirred or self._events)
                if self._closing:
                    return
                events, self._events, self._stirred = self._events, [], False
            try:
                for number in self._advance(events):
                    self._begin(number)
            except BaseException as error:  # noqa: BLE001 - raised by the step that waits
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return

    def _begin(self, number: int) -> None:
        def begun() -> None:
            with self._changed:
                self._begun(number)

        def ended(session_id: str) -> None:
            self._happened(SessionEnded(number, session_id))

        group = self._start(number, begun, ended)
        group.add_done_callback(lambda future: self._happened(GroupEnded(number, future)))


def in_order(groups: Sequence[Sequence[Episode]]) -> list[Episode]:
    """Return the sessions of some groups in the order in which they began.

    The groups are ordered by their first session. The order does not depend on how the sessions
    ended, so their training is reproducible.
    """
    by_session = [sorted(group, key=lambda episode: began(episode.session)) for group in groups]
    by_session.sort(key=lambda group: began(group[0].session) if group else (0.0, ""))
    return [episode for group in by_session for episode in group]


def began(session: SessionRecord) -> tuple[float, str]:
    """Return the sort key of a session: when it began, and its id where two began at once."""
    return session.created_at, session.id
