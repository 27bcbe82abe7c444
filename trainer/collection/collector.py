"""The collection of groups while the policy trains: each group begins, runs and ends on its own.

A thread begins groups as :class:`GroupBook` allows, loads ended ones, and judges them; the trainer
takes a step's groups when there are enough. A slow session delays its own group only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

from bridle.reconstruct.samples.sample import Episode
from bridle.store.records import SessionRecord
from bridle.trainer.batch.filters import newest_version, trained_tokens
from bridle.trainer.batch.prepare import prepare
from bridle.trainer.collection.book import GroupBook, Verdict
from bridle.trainer.config import GrpoConfig
from bridle.trainer.credit import ADVANTAGES, is_scoring


class Collect(Protocol):
    def __call__(self, step: int, version: int) -> Sequence[Episode]:
        """Return the sessions that ``step`` trains; ``version`` is the policy's present version."""


class StartGroup(Protocol):
    def __call__(self, number: int, begun: Callable[[], None]) -> Future[Sequence[str]]:
        """Run the sessions of group ``number``; the future gives their ids when all have ended.

        Call ``begun``, from any thread, when the first of them begins.
        """


class Collector:
    """The sessions of each step, collected by a thread; a :class:`Collect`.

    With ``max_staleness = 0`` groups run while the trainer waits for them, and every session is of
    the present version. With ``n`` the groups of up to ``n`` steps run ahead. Leaving the context
    ends the thread but not the sessions, which their starter ends.
    """

    def __init__(
        self,
        start: StartGroup,
        load: Callable[[str], Episode],
        config: GrpoConfig,
        *,
        per_step: int,
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
        limit = max(per_step, round(per_step * config.filters.refill))
        self._book = GroupBook(per_step, config.max_staleness, limit)
        self._changed = threading.Condition()
        self._ended: list[tuple[int, Future[Sequence[str]]]] = []
        self._episodes: dict[int, list[Episode]] = {}
        self._version = 0
        self._steps_left = 0
        self._failure: BaseException | None = None
        self._stirred = self._closing = self._training = False
        self._thread = threading.Thread(target=self._work, name="collect", daemon=True)

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def restore(self, groups: Mapping[str, Any], step: int) -> None:
        """Continue after the groups that a checkpoint after ``step`` steps has trained."""
        first = {"first": step * self._book.per_step, "taken": []}
        self._book.restore(groups or first)

    def groups(self) -> dict[str, Any]:
        """Return the state that a checkpoint keeps for :meth:`restore`."""
        with self._changed:
            return self._book.as_data()

    def __call__(self, step: int, version: int) -> list[Episode]:
        """Wait for the step's groups and return their sessions.

        Raise any error of running or loading one.
        """
        with self._changed:
            self._version, self._steps_left = version, self._config.steps - step
            self._training = False
            self._stir()
            while (found := self._chosen()) is None:
                self._changed.wait()
            self._book.take(found)
            self._steps_left -= 1
            self._training = True
            self._stir()
            taken = [self._episodes.pop(number) for number in found]
        return in_order(taken)

    def published(self, version: int) -> None:
        """Record that the engine serves ``version`` from now on.

        Record also that the next step trains it.
        """
        with self._changed:
            self._version = version
            self._training = self._config.max_staleness == 0
            self._stir()

    def _chosen(self) -> list[int] | None:
        if self._failure is not None:
            raise self._failure
        if self._stirred or self._ended or self._book.unjudged(self._version):
            return None
        return self._book.ready()

    def _stir(self) -> None:
        self._stirred = True
        self._changed.notify_all()

    # -- the thread ------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._stirred or self._ended)
                if self._closing:
                    return
                ended, self._ended, self._stirred = self._ended, [], False
            try:
                self._advance(ended)
            except BaseException as error:  # noqa: BLE001 - raised by the step that waits
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return

    def _advance(self, ended: Sequence[tuple[int, Future[Sequence[str]]]]) -> None:
        loaded = {number: [self._load(one) for one in future.result()] for number, future in ended}
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
        for number in begin:
            self._begin(number)

    def _next(self) -> int | None:
        return self._book.begin(self._version, self._steps_left, self._training)

    def _begin(self, number: int) -> None:
        def begun() -> None:
            with self._changed:
                self._book.begun(number, self._version)

        def ended(future: Future[Sequence[str]]) -> None:
            with self._changed:
                self._ended.append((number, future))
                self._changed.notify_all()

        self._start(number, begun).add_done_callback(ended)

    def _verdict(self, group: Sequence[Episode], version: int) -> Verdict:
        late = [
            version - newest_version(episode) > self._config.max_staleness
            for episode in group
            if trained_tokens(episode)
        ]
        if late and all(late):
            return "late"
        if self._config.filters.refill > 1 and not prepare(group, version, self._judging).items:
            return "spent"
        return "live"


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
