"""The book of groups: those that run, are finished, or have been taken, and the rule of capacity.

Groups are numbered. At most ``(max_staleness + 1) * per_step`` groups that can still be trained in
time are begun and not taken, so that what a step takes was begun at most ``max_staleness`` versions
before. A group with a session slower than that is *overdue*: it no longer counts, and another group
begins in its place. Its tokens that are still fresh when it ends are trained.

The rule is AReaL's (arXiv 2505.24298, section 5.1), with overdue groups left out of the count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Verdict = Literal["live", "spent", "late"]
"""The verdict on a finished group. ``live`` means that a step can train it, ``spent`` that its
sessions teach nothing, and ``late`` that all it sampled is too old. Another group takes the place
of a spent or late one."""


@dataclass(slots=True)
class _Group:
    begun: int | None = None
    """Policy version at which its first session began, or ``None`` while it waits for a slot."""
    finished: bool = False
    verdict: Verdict = "live"
    judged: int = -1
    """Policy version of the verdict, or -1 if there is none."""


@dataclass(slots=True)
class GroupBook:
    """The groups of one run; a plain value that knows neither threads nor sessions."""

    per_step: int
    max_staleness: int
    limit: int
    """Maximum number of groups that one step takes, with spent ones and without late ones."""
    first: int = 0
    """Number of the first group that has not been taken."""
    taken: set[int] = field(default_factory=set)
    """Groups from ``first`` on that have been taken."""
    _open: dict[int, _Group] = field(default_factory=dict)
    """Groups that have begun and have not been taken, by number."""

    # -- beginning -------------------------------------------------------------------------------

    def begin(self, version: int, steps_left: int, training: bool = False) -> int | None:
        """Begin the next group while ``version`` is served. Return ``None`` if no group may begin.

        ``steps_left`` is the number of training steps whose groups have not been taken.
        ``training`` is true while the version after ``version`` is being trained; that is then the
        earliest version at which the group can be trained.
        """
        steps = min(self.max_staleness + 1 - training, steps_left)
        if self._counted(version + training) >= self.per_step * steps:
            return None
        number = self.first
        while number in self.taken or number in self._open:
            number += 1
        self._open[number] = _Group()
        return number

    def _counted(self, version: int) -> int:
        """Return the number of groups that can be trained in time at ``version``."""
        oldest = version - self.max_staleness
        spent, counted = 0, 0
        for group in self._open.values():
            if group.finished:
                spent += group.verdict == "spent"
                counted += group.verdict == "live"
            elif group.begun is None or group.begun >= oldest:
                counted += 1
        # A step ends at its limit: spent groups beyond it are not replaced.
        return counted + max(0, spent - (self.limit - self.per_step))

    def begun(self, number: int, version: int) -> None:
        """Record that a session of a group begins now; only the first one counts."""
        group = self._open[number]
        if group.begun is None:
            group.begun = version

    def finish(self, number: int) -> None:
        """Record that every session of a group has ended."""
        self._open[number].finished = True

    # -- taking ----------------------------------------------------------------------------------

    def unjudged(self, version: int) -> list[int]:
        """Return the finished groups whose verdict is of an earlier version."""
        return sorted(
            number
            for number, group in self._open.items()
            if group.finished and group.judged < version
        )

    def judge(self, number: int, verdict: Verdict, version: int) -> None:
        self._open[number].verdict, self._open[number].judged = verdict, version

    def ready(self) -> list[int] | None:
        """Return the groups that a step takes now, or ``None`` if too few are finished.

        The groups are oldest first: up to ``per_step`` live ones, spent ones up to ``limit``, and
        all late ones.
        """
        finished = [number for number in sorted(self._open) if self._open[number].finished]
        of = {
            verdict: [number for number in finished if self._open[number].verdict == verdict]
            for verdict in get_args(Verdict)
        }
        live = of["live"][: self.per_step]
        spent = of["spent"][: self.limit - len(live)]
        if len(live) < self.per_step and len(live) + len(spent) < self.limit:
            return None
        return sorted([*live, *spent, *of["late"]])

    def take(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            del self._open[number]
            self.taken.add(number)
        while self.first in self.taken:
            self.taken.remove(self.first)
            self.first += 1

    def running(self) -> int:
        return sum(not group.finished for group in self._open.values())

    # -- going on --------------------------------------------------------------------------------

    def as_data(self) -> dict[str, Any]:
        """Return the plain data that a checkpoint keeps."""
        return {"first": self.first, "taken": sorted(self.taken)}

    def restore(self, data: Mapping[str, Any]) -> None:
        self.first, self.taken = int(data["first"]), set(data["taken"])
