"""Groups of sessions that are recorded already, by any program.

A group is trained once, in the order in which groups began. Rewards may arrive long after a
session: while the trainer waits, a group counts once enough of its sessions are sealed and
rewarded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bridle.errors import BridleError
from bridle.reconstruct.samples.sample import Episode
from bridle.store.records import SessionRecord
from bridle.trainer.batch.filters import MaskReason, masked
from bridle.trainer.collection.background import began, in_order

POLL_S: Final = 2.0


class NothingRecorded(BridleError):
    """The selection has no session that could be trained."""


@dataclass(slots=True)
class RecordedGroups:
    """The recorded groups of each step, in place of those that :class:`Collector` runs."""

    find: Callable[[], Iterable[SessionRecord]]
    """Returns the selected sessions that are sealed, as the store has them now."""
    load: Callable[[str], Episode]
    per_step: int
    oldest: int = 0
    """The oldest policy version whose tokens are trained."""
    complete: int | None = None
    """Number of sealed and rewarded sessions that make a group; the trainer waits for them. With
    ``None`` a group is what is recorded now."""
    is_rewarded: Callable[[SessionRecord], bool] = lambda _session: True
    trained: set[str] = field(default_factory=set)
    """Keys of the groups that have been trained."""

    def steps(self) -> int:
        """Return the number of steps that train every group that is there now."""
        return math.ceil(len(self._ready()) / self.per_step)

    def first(self, limit: int) -> list[Episode]:
        """Return up to ``limit`` sessions of the first groups."""
        ids = [one for group in self._ready().values() for one in group]
        return [self.load(one) for one in ids[:limit]]

    def __call__(self, step: int, version: int) -> list[Episode]:
        """Return the sessions of the next ``per_step`` groups.

        There are fewer groups only if no more are to come.
        """
        ready = self._ready()
        while self.complete is not None and len(ready) < self.per_step:
            time.sleep(POLL_S)
            ready = self._ready()
        chosen = list(ready)[: self.per_step]
        self.trained.update(chosen)
        return in_order([[self.episode(one, version) for one in ready[key]] for key in chosen])

    def episode(self, session_id: str, version: int) -> Episode:
        """Return a session without its tokens of versions that are too old or not reached yet.

        The versions are those before ``oldest`` and those beyond ``version``, which this training
        has not reached. Tokens of both were sampled from other weights.
        """
        episode = self.load(session_id)
        versions = [sample.versions for sample in episode.samples]
        earlier = [(each >= 0) & (each < self.oldest) for each in versions]
        episode = masked(episode, earlier, MaskReason.STALE)
        return masked(episode, [each > version for each in versions], MaskReason.VERSION_AHEAD)

    def restore(self, groups: Mapping[str, Any]) -> None:
        self.trained = set(groups.get("recorded", ()))

    def groups(self) -> dict[str, Any]:
        """Return the state that a checkpoint keeps for :meth:`restore`."""
        return {"recorded": sorted(self.trained)}

    def earlier(self) -> Sequence[Episode]:
        """Return nothing: a group is taken as a whole."""
        return ()

    def _ready(self) -> dict[str, list[str]]:
        """Return session ids by the key of their group.

        The groups are in the order of their first session.
        """
        found: dict[str, list[SessionRecord]] = {}
        for session in self.find():
            key = group_key(session)
            if key not in self.trained:
                found.setdefault(key, []).append(session)
        if self.complete is not None:
            found = {
                key: group
                for key, group in found.items()
                if sum(map(self.is_rewarded, group)) >= self.complete
            }
        by_first = sorted(found.items(), key=lambda item: min(map(began, item[1])))
        return {key: [one.id for one in group] for key, group in by_first}


def group_key(session: SessionRecord) -> str:
    """Return the group of a session as text: its own, else its task, else the session alone."""
    if session.group_id is None and session.task_id is not None:
        return f"{session.task_suite}/{session.task_split}/{session.task_id}"
    return session.group_id or session.id
