"""Which groups run, which are finished, and which have been taken: the rule of capacity.

Groups are numbered. At most ``(max_staleness + 1) * per_step`` groups that can still be trained in
time are begun and not taken, so that what a step takes was begun at most ``max_staleness`` versions
before. A group with a session slower than that is *overdue*: it is waited for by nobody and no
longer counted, another begins in its place, and what of it is still fresh when it ends is trained.

The rule is AReaL's (arXiv 2505.24298, section 5.1), with overdue groups left out of the count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Verdict = Literal["live", "spent", "late"]
"""``spent``: its sessions teach nothing. ``late``: all that it sampled is too old. Another group
takes the place of either."""


@dataclass(slots=True)
class _Group:
    begun: int | None = None
    """Policy version at which its first session began; ``None``: it waits for a slot."""
    finished: bool = False
    verdict: Verdict = "live"
    judged: int = -1
    """Policy version that the verdict is for."""


@dataclass(slots=True)
class GroupBook:
    """The groups of one run; a plain value that knows neither threads nor sessions."""

    per_step: int
    max_staleness: int
    limit: int
    """Most groups that one step takes, spent ones included and late ones not."""
    first: int = 0
    """Every group before it has been taken."""
    taken: set[int] = field(default_factory=set)
    """Groups from ``first`` on that have been taken."""
    _open: dict[int, _Group] = field(default_factory=dict)
    """Begun and not taken."""

    # -- beginning -------------------------------------------------------------------------------

    def begin(self, version: int, steps_left: int, training: bool = False) -> int | None:
        """The next group to begin while ``version`` is served; ``None``: no group may begin.

        ``steps_left``: training steps whose groups have not been taken. ``training``: the version
        after ``version`` is in the making, and is the earliest that the group can be trained at.
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
        """Groups that can be trained in time at ``version``."""
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
        """A session of a group begins now; the first one counts."""
        group = self._open[number]
        if group.begun is None:
            group.begun = version

    def finish(self, number: int) -> None:
        """Every session of a group has ended."""
        self._open[number].finished = True

    # -- taking ----------------------------------------------------------------------------------

    def unjudged(self, version: int) -> list[int]:
        """Finished groups whose verdict is of an earlier version."""
        return sorted(
            number
            for number, group in self._open.items()
            if group.finished and group.judged < version
        )

    def judge(self, number: int, verdict: Verdict, version: int) -> None:
        self._open[number].verdict, self._open[number].judged = verdict, version

    def ready(self) -> list[int] | None:
        """The groups that a step takes now, oldest first: ``per_step`` live ones, and all that are
        spent or late; ``None``: too few are finished."""
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
        """What a checkpoint keeps of it."""
        return {"first": self.first, "taken": sorted(self.taken)}

    def restore(self, data: Mapping[str, Any]) -> None:
        self.first, self.taken = int(data["first"]), set(data["taken"])
