"""The book of sessions: those that run, have ended, or have been taken, and the rule of capacity.

Sessions begin in groups and are taken one by one. With ``n`` sessions in flight or waiting and
``m`` taken by a step, a session waits for ``n / m`` steps on average (Little's law), so the bound
on ``n`` is a bound on the mean lag. No session is too slow for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class _Group:
    size: int
    """Number of sessions that it has or is expected to have."""
    taken: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    """Ids of the sessions that have ended and have not been taken."""
    late: Collection[str] = ()
    """The ids of waiting sessions of which all is too old."""
    live: bool = False
    """True if the others teach something beside the siblings that have ended so far."""
    finished: bool = False
    judged: int = -1
    """Policy version of the judgement, or -1 if there is none."""
    changed: bool = False
    """True if a session has ended since."""

    def spent(self) -> list[str]:
        """Return the sessions that teach nothing, whatever siblings are still to end."""
        return [
            one for one in self.waiting if one in self.late or (self.finished and not self.live)
        ]

    def trainable(self) -> list[str]:
        return [one for one in self.waiting if one not in self.late] if self.live else []


@dataclass(slots=True)
class SessionBook:
    """The sessions of one run; a plain value that knows neither threads nor rewards."""

    per_step: int
    """Number of sessions that teach something and that a step takes."""
    group_size: int
    lag: int
    """Mean number of versions by which a session may lag behind."""
    limit: int
    """Number of sessions after which a step is full, those included that teach nothing."""
    first: int = 0
    """Number of the first group that is not done."""
    done: set[int] = field(default_factory=set)
    """Groups from ``first`` on of which every session has been taken."""
    partial: dict[int, list[str]] = field(default_factory=dict)
    """Ids of the sessions that an earlier attempt took of a group, by its number."""
    _open: dict[int, _Group] = field(default_factory=dict)

    # -- beginning -------------------------------------------------------------------------------

    def begin(self, steps_left: int) -> int | None:
        """Begin the next group. Return ``None`` if none may begin."""
        if self._counted() >= self.per_step * min(self.lag + 1, steps_left):
            return None
        number = self.first
        while number in self.done or number in self._open:
            number += 1
        self._open[number] = _Group(self.group_size, self.partial.pop(number, []))
        return number

    def _counted(self) -> int:
        """Return the number of sessions in flight or waiting, without spent ones to be replaced.

        If it is at least that of a step, a step is full once all of them have ended.
        """
        spent = sum(len(group.spent()) for group in self._open.values())
        outstanding = sum(group.size - len(group.taken) for group in self._open.values())
        return outstanding - min(spent, self.limit - self.per_step)

    def end(self, number: int, session_id: str) -> bool:
        """Record the end of a session. Return whether no earlier attempt has taken it."""
        group = self._open[number]
        if session_id in group.taken:
            return False
        group.waiting.append(session_id)
        group.changed = True
        return True

    def finish(self, number: int) -> None:
        """Record that every session of a group has ended."""
        group = self._open[number]
        group.finished = group.changed = True
        group.size = len(group.taken) + len(group.waiting)
        self._close(number)

    # -- taking ----------------------------------------------------------------------------------

    def unjudged(self, version: int) -> list[int]:
        """Return the groups with waiting sessions whose judgement is not of ``version``."""
        return sorted(
            number
            for number, group in self._open.items()
            if group.waiting and (group.changed or group.judged < version)
        )

    def is_live(self, number: int, version: int) -> bool:
        """Return whether a group was live at ``version``, and so still is with another session."""
        group = self._open[number]
        return group.live and group.judged == version

    def judge(self, number: int, late: Collection[str], live: bool, version: int) -> None:
        group = self._open[number]
        group.late, group.live, group.judged, group.changed = late, live, version, False

    def waiting(self, number: int) -> list[str]:
        return list(self._open[number].waiting)

    def ready(self) -> dict[int, list[str]] | None:
        """Return the sessions that a step takes, by group, or ``None`` if too few have ended.

        The groups are oldest first. All sessions that teach nothing are among them.
        """
        found: dict[int, list[str]] = {}
        room, spent = self.per_step, 0
        for number, group in sorted(self._open.items()):
            chosen = group.trainable()[:room]
            over = group.spent()
            room, spent = room - len(chosen), spent + len(over)
            if chosen or over:
                found[number] = chosen + over
        if room and self.per_step - room + spent < self.limit:
            return None
        return found

    def take(self, chosen: Mapping[int, Iterable[str]]) -> None:
        for number, sessions in chosen.items():
            group = self._open[number]
            for one in sessions:
                group.waiting.remove(one)
                group.taken.append(one)
            self._close(number)

    def _close(self, number: int) -> None:
        group = self._open[number]
        if group.waiting or not group.finished:
            return
        del self._open[number]
        self.done.add(number)
        while self.first in self.done:
            self.done.remove(self.first)
            self.first += 1

    def is_open(self, number: int) -> bool:
        return number in self._open

    # -- going on --------------------------------------------------------------------------------

    def as_data(self) -> dict[str, Any]:
        """Return the plain data that a checkpoint keeps."""
        begun = {number: group.taken for number, group in self._open.items() if group.taken}
        partial = {str(number): list(taken) for number, taken in {**self.partial, **begun}.items()}
        return {"first": self.first, "taken": sorted(self.done), "partial": partial}

    def restore(self, data: Mapping[str, Any]) -> None:
        self.first, self.done = int(data["first"]), set(data["taken"])
        self.partial = {int(number): ids for number, ids in data.get("partial", {}).items()}
