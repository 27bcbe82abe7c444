"""The origins of groups of siblings in a training run: its latest sessions, by the store.

With a horizon that grows, siblings branch near the end of a session at first, and earlier from step
to step (a prefix curriculum, as TRACE has it).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Final

import numpy as np

from bridle.harnesses.client import Origin
from bridle.run.config import GroupsConfig
from bridle.run.groups import BranchedTask
from bridle.store.call import CallRow
from bridle.store.reading.queries import Reader
from bridle.store.records import BESIDE, CallKind, CallStatus
from bridle.trainer.collection.branching import (
    BranchPoint,
    EndedSession,
    chosen,
    in_order,
    is_branch,
)

_TRIES: Final = 8
"""Sessions that are looked at for one that has a call to branch at."""


@dataclass(frozen=True, slots=True)
class _Ended:
    task: str
    group: str | None
    success: bool


class Branches:
    """The latest sessions of a run, and the choice of the calls at which siblings leave them.

    Threads may share it.
    """

    def __init__(
        self,
        reader: Reader,
        config: GroupsConfig,
        seed: int,
        horizon: Callable[[int], int] = lambda _number: 0,
    ) -> None:
        """``horizon`` returns the number of live calls that the siblings of a group may make.

        They branch at one of so many last calls of a session; 0 stands for any.
        """
        self._reader = reader
        self._config = config
        self._seed = seed
        self._horizon = horizon
        self._ended: OrderedDict[str, _Ended] = OrderedDict()
        self._lock = threading.Lock()

    def learn(self, session_id: str, group_id: str | None, task: str, success: bool) -> None:
        """Add a session that is over. Those of older groups are forgotten."""
        with self._lock:
            self._ended[session_id] = _Ended(task, group_id, success)
            while len(self._ended) > self._config.branch_recent * self._config.size:
                self._ended.popitem(last=False)

    def __call__(self, number: int) -> BranchedTask | None:
        """Return the origin of group ``number``, or ``None`` if it begins at its task's start."""
        if not is_branch(number, self._config.branch):
            return None
        rng = np.random.default_rng((self._seed, number))
        with self._lock:
            ended = dict(self._ended)
        for session in in_order(_sessions(ended), self._config.branch_at, rng)[:_TRIES]:
            points = self._points(session)[-self._horizon(number) :]
            if (point := chosen(points, self._config.branch_at, rng)) is not None:
                return BranchedTask(ended[session.id].task, Origin(session.id, point.call_id))
        return None

    def calls_before(self, origin: Origin | None) -> int:
        """Return the number of calls that the siblings of an origin have from the record."""
        if origin is None:
            return 0
        calls = [call for call in self._reader.calls(origin.session) if _is_replayed(call)]
        ids = [call.id for call in calls]
        return ids.index(origin.call) if origin.call in ids else len(ids)

    def _points(self, session: EndedSession) -> list[BranchPoint]:
        """Return the calls of a session at which it can be re-entered, all but the first."""
        calls = [
            call
            for call in self._reader.calls(session.id)
            if call.status is CallStatus.COMPLETE and call.kind not in BESIDE
        ]
        first = calls[0].id if calls else None
        live = [call for call in calls if call.replayed_call_id is None]
        return [
            BranchPoint(
                call.id,
                self._surprise(call.id) if self._config.branch_at == "entropy" else 0.0,
                session.chance(passed, len(live)),
                len(live) - passed,
            )
            for passed, call in enumerate(live)
            if call.id != first
        ]

    def _surprise(self, call_id: str) -> float:
        choices = self._reader.sampled(call_id)
        if not choices or choices[0].logprobs is None or not len(choices[0].logprobs):
            return 0.0
        return float(-np.nanmean(choices[0].logprobs))


def _sessions(ended: Mapping[str, _Ended]) -> list[EndedSession]:
    results: dict[str | None, list[bool]] = {}
    for how in ended.values():
        results.setdefault(how.group, []).append(how.success)
    return [
        EndedSession(session, how.success, fmean(results[how.group]))
        for session, how in ended.items()
    ]


def _is_replayed(call: CallRow) -> bool:
    return call.status is CallStatus.COMPLETE and call.kind is not CallKind.COUNT
