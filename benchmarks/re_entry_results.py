"""The results of ``bridle bench re-entry``: a file of measured sessions, and a table of sums.

A run appends a line for each session as soon as it is over. The next run measures only the sessions
that the file does not have, so that a long measurement can be stopped, and made larger later.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from bridle.bench.seeded_policy import Kind

ENTERED: Final = 0.95
"""The share of the sessions of foreground work that must be re-entered."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The figures of a harness in a kind of sandbox, over sessions of one kind."""

    harness: str
    sandbox: str
    kind: Kind
    seed: int
    """The seed of the first session. In the file, the other sessions have the seeds after it."""
    sessions: int = 1
    recorded: int = 0
    """Sessions that were recorded whole."""
    entered: int = 0
    equal: int = 0
    """Sessions whose first live prompt has the ids of the recorded call's prompt."""
    replayed: int = 0
    """Turns that were answered from the record."""
    asked: int = 0
    """Requests to the engine beyond those of the live calls."""
    conserved: int = 0
    """Sessions with a clean audit, whose captured tokens are those of the live calls."""
    seconds: float = 0.0
    seconds_again: float = 0.0
    stopped: tuple[str, ...] = ()
    """The reasons of the sessions that stopped."""
    problems: tuple[str, ...] = ()
    """Sessions that could not be recorded, or went wrong in silence."""

    @property
    def name(self) -> str:
        return f"{self.harness} in {self.sandbox} ({self.kind})"

    def __add__(self, other: Cell) -> Cell:
        sums = (getattr(self, name) + getattr(other, name) for name in _SUMMED)
        return Cell(self.harness, self.sandbox, self.kind, min(self.seed, other.seed), *sums)

    def failures(self) -> list[str]:
        """Return one line for each requirement that fails."""
        found = [f"{self.name}: {problem}" for problem in self.problems]
        if self.equal != self.entered:
            found.append(f"{self.name}: {self.entered - self.equal} first live prompts differ")
        if self.asked:
            found.append(f"{self.name}: {self.asked} engine calls for replayed turns")
        if self.conserved != self.recorded:
            found.append(f"{self.name}: {self.recorded - self.conserved} sessions lost tokens")
        return found


_SUMMED: Final = Cell.__match_args__[4:]


@dataclass(slots=True)
class Report:
    """The measured sessions, in a file if there is one."""

    file: Path | None = None
    measured: list[Cell] = field(default_factory=list)

    @classmethod
    def read(cls, file: Path) -> Report:
        """Return the report of a file, which need not exist."""
        lines = file.read_bytes().splitlines() if file.exists() else []
        return cls(file, [msgspec.json.decode(line, type=Cell) for line in lines])

    def add(self, cell: Cell) -> None:
        """Add a session that was measured, to the file as well if it was recorded."""
        self.measured.append(cell)
        if self.file is not None and cell.recorded:
            with self.file.open("ab") as lines:
                lines.write(msgspec.json.encode(cell) + b"\n")

    def missing(self, harness: str, sandbox: str, kind: Kind, seeds: Iterable[int]) -> list[int]:
        """Return the seeds whose sessions are not measured."""
        row = (harness, sandbox, kind)
        lines = [one for one in self.measured if (one.harness, one.sandbox, one.kind) == row]
        return [s for s in seeds if not any(s in range(c.seed, c.seed + c.sessions) for c in lines)]

    def cells(self) -> list[Cell]:
        """Return the sums of each kind, harness and sandbox."""
        sums: dict[tuple[int, str, str], Cell] = {}
        for cell in self.measured:
            row = (list(Kind).index(cell.kind), cell.harness, cell.sandbox)
            sums[row] = sums[row] + cell if row in sums else cell
        return [sums[row] for row in sorted(sums)]

    def failures(self) -> list[str]:
        """Return one line for each requirement that fails."""
        found = [failure for cell in self.cells() for failure in cell.failures()]
        work = [cell for cell in self.measured if cell.kind is Kind.WORK]
        entered, sessions = sum(c.entered for c in work), sum(c.sessions for c in work)
        if entered < ENTERED * sessions:
            found.append(f"{entered} of {sessions} sessions of work were re-entered")
        return found

    def markdown(self) -> str:
        """Return the sums in words and as a table, the reasons, and what fails."""
        stopped = Counter((one.name, why) for one in self.measured for why in one.stopped)
        parts = [_in_words(self.measured), "\n".join((_HEADER, *map(_row, self.cells())))]
        if stopped:
            reasons = (f"- {name}, {n}: {why}" for (name, why), n in sorted(stopped.items()))
            parts.append("\n".join(("Stopped:", "", *reasons)))
        if failures := self.failures():
            parts.append("\n".join(("What fails:", "", *(f"- {line}" for line in failures))))
        return "\n\n".join(parts) + "\n"


_HEADER: Final = """\
| harness | sandbox | sessions of | recorded | re-entered | stopped | first live prompt equal | \
replayed turns | engine calls for them | tokens conserved | time again |
|---|---|---|---|---|---|---|---|---|---|---|"""


def _row(cell: Cell) -> str:
    shown = (
        *(cell.harness, cell.sandbox, cell.kind, cell.recorded, cell.entered, len(cell.stopped)),
        *(cell.equal, cell.replayed, cell.asked, cell.conserved),
        f"{cell.seconds_again / cell.seconds:.2f}" if cell.seconds else "",
    )
    return f"| {' | '.join(map(str, shown))} |"


def _in_words(measured: Sequence[Cell]) -> str:
    work = [cell for cell in measured if cell.kind is Kind.WORK]
    others = [cell for cell in measured if cell.kind is not Kind.WORK]
    ends = (
        f"Of {sum(one.sessions for one in cells)} {name}, {sum(one.entered for one in cells)} were "
        f"re-entered and {sum(len(one.stopped) for one in cells)} stopped with a reason."
        for name, cells in (("sessions of work", work), ("others", others))
    )
    wrong = sum(len(one.problems) for one in measured)
    text = f"{' '.join(ends)} {wrong or 'None'} ended otherwise."
    return textwrap.fill(text, 100, break_on_hyphens=False)
