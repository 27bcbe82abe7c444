"""Groups of sessions that are recorded already, by whatever ran them.

A group is trained once, in the order in which groups began. Rewards may come long after a session:
while the trainer waits, a group counts when so many of its sessions are sealed and rewarded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from bridle.errors import BridleError
from bridle.reconstruct.samples.sample import Episode
from bridle.store.records import SessionRecord
from bridle.trainer.batch.filters import MaskReason, masked
from bridle.trainer.collection.collector import began, in_order

POLL_S: Final = 2.0


class NothingRecorded(BridleError):
    """The selection takes no session that could be trained."""


@dataclass(slots=True)
class RecordedGroups:
    """Hands over the groups of each step, as :class:`Collector` does those that run."""

    find: Callable[[], Iterable[SessionRecord]]
    """The selected sessions that are sealed, as the store has them now."""
    load: Callable[[str], Episode]
    per_step: int
    oldest: int = 0
    """Tokens of earlier policy versions are not trained."""
    complete: int | None = None
    """Sealed and rewarded sessions that make a group; it waits for them. ``None``: a group is what
    is recorded now."""
    is_rewarded: Callable[[SessionRecord], bool] = lambda _session: True
    trained: set[str] = field(default_factory=set)
    """Keys of the groups that have been trained."""

    def steps(self) -> int:
        """Steps that train every group that is there now."""
        return math.ceil(len(self._ready()) / self.per_step)

    def first(self, limit: int) -> list[Episode]:
        """Some sessions of the groups that come first."""
        ids = [one for group in self._ready().values() for one in group]
        return [self.load(one) for one in ids[:limit]]

    def __call__(self, step: int, version: int) -> list[Episode]:
        """The next ``per_step`` groups; fewer only when no more are to come."""
        ready = self._ready()
        while self.complete is not None and len(ready) < self.per_step:
            time.sleep(POLL_S)
            ready = self._ready()
        chosen = list(ready)[: self.per_step]
        self.trained.update(chosen)
        return in_order([[self.episode(one, version) for one in ready[key]] for key in chosen])

    def episode(self, session_id: str, version: int) -> Episode:
        """A session without tokens of versions before ``oldest``, and of those that this training
        has not reached at ``version``: both are of other weights."""
        episode = self.load(session_id)
        versions = [sample.versions for sample in episode.samples]
        earlier = [(each >= 0) & (each < self.oldest) for each in versions]
        episode = masked(episode, earlier, MaskReason.STALE)
        return masked(episode, [each > version for each in versions], MaskReason.VERSION_AHEAD)

    def restore(self, groups: Mapping[str, Any]) -> None:
        self.trained = set(groups.get("recorded", ()))

    def groups(self) -> dict[str, Any]:
        """What a checkpoint keeps for :meth:`restore`."""
        return {"recorded": sorted(self.trained)}

    def _ready(self) -> dict[str, list[str]]:
        """Session ids by the key of their group, groups by their first session."""
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
    """The group of a session as text: its own, else its task, else itself alone."""
    if session.group_id is None and session.task_id is not None:
        return f"{session.task_suite}/{session.task_split}/{session.task_id}"
    return session.group_id or session.id
