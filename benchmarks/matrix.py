"""``bridle bench matrix``: every installed harness on every family's template, cell by cell.

A cell is one session of a harness, unmodified, through the real proxy, with a family's genuine
template and tokenizer. Its policy thinks and asks for two commands in each of six turns. The
recording is rebuilt and audited. A cell is one row without an unexplained break, or the proxy has
refused the harness at its first call, with the reason. A harness that cannot start fails its own
cells alone.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from bridle.bench.families import FAMILIES, model_directory
from bridle.bench.harness_cases import CASES, HarnessCase
from bridle.bench.harnesses import measured
from bridle.bench.played_engine import app_of
from bridle.bench.played_family import PlayedFamily
from bridle.bench.shell_policy import ShellPolicy, WorkedThrough
from bridle.engine.contract.tokenizer import Tokenizer
from bridle.engine.serve.transport import ServerThread
from bridle.harnesses.adapters.base import Adapter
from bridle.harnesses.client import Client
from bridle.harnesses.fleet import LocalFleet
from bridle.harnesses.rollout import Job, Rollout, RolloutSettings
from bridle.harnesses.sandboxes import NotLaunchable, ProcessProvider
from bridle.proxy.continuation.continuation import Continuer
from bridle.proxy.continuation.roles import FOR_TEMPLATES
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.recipes.models.packages import PackageNotFetched
from bridle.reconstruct.conversation import tools
from bridle.store.reading.queries import CallRow, Reader
from bridle.store.records import CallStatus

TURNS: Final = 6
SAMPLE: Final = ("qwen3.5", "llama3.3", "gemma3")
"""The families of the sample that is run where all of them would take too long."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A harness on a family's template."""

    rows: int
    breaks: int
    unexplained: int
    calls: int
    problems: tuple[str, ...] = ()
    """Reasons why the session does not count: it failed, or its record is not clean."""
    refused: str = ""
    """The reason why the proxy refused the harness at its first call with tools."""
    changed: tuple[str, ...] = ()
    """The names of the notes on what was changed for the template."""
    not_started: str = ""
    """The reason why the harness could not start."""

    @classmethod
    def without_start(cls, error: NotLaunchable) -> Cell:
        """Return the cell of a harness that could not start."""
        return cls(0, 0, 0, 0, not_started=str(error))

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Cell:
        """Return the cell of :meth:`as_data`."""
        given = {one.name: data[one.name] for one in fields(cls) if one.name in data}
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in given.items()
        }
        return cls(**values)

    @property
    def failures(self) -> list[str]:
        """One line for each requirement that the cell fails."""
        if self.refused:
            return []
        if self.not_started:
            return [f"did not start: {self.not_started}"]
        found = [*self.problems]
        if self.rows != 1:
            found.append(f"{self.rows} rows of 1 session")
        if self.unexplained:
            found.append(f"{self.unexplained} unexplained breaks")
        return found

    def as_data(self) -> dict[str, Any]:
        return {**asdict(self), "failures": self.failures}


@dataclass(slots=True)
class Matrix:
    """All cells by family and harness, and the families whose template could not be fetched."""

    cells: dict[str, dict[str, Cell]] = field(default_factory=dict)
    not_fetched: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Matrix:
        """Return the matrix that :meth:`write` wrote, without the cells that fail."""
        made = cls()
        for family, row in json.loads(path.read_text(encoding="utf-8"))["cells"].items():
            cells = {name: Cell.from_data(cell) for name, cell in row.items()}
            made.cells[family] = {name: cell for name, cell in cells.items() if not cell.failures}
        return made

    def write(self, path: Path) -> None:
        """Write the matrix as JSON, whole or not at all."""
        written = path.with_name(f".{path.name}.new")
        written.write_text(json.dumps(self.as_data(), indent=1) + "\n", encoding="utf-8")
        written.replace(path)

    def as_data(self) -> dict[str, Any]:
        cells = {
            family: {name: cell.as_data() for name, cell in row.items()}
            for family, row in self.cells.items()
        }
        return {"cells": cells, "not_fetched": self.not_fetched}

    def failures(self) -> list[str]:
        """Return one line for each requirement that a cell fails."""
        return [
            f"{name} on {family}: {failure}"
            for family, row in self.cells.items()
            for name, cell in row.items()
            for failure in cell.failures
        ]


async def bench_matrix(
    families: Sequence[str],
    cases: Sequence[HarnessCase],
    *,
    known: Matrix | None = None,
    parallel: int = 2,
    keep: Path | None = None,
    progress: Callable[[Matrix, str, str], None] = lambda matrix, family, name: None,
) -> Matrix:
    """Run every harness on every family. One that cannot start has cells with the reason.

    The cells of ``known`` are not run again. ``parallel`` harnesses run at once. If ``keep`` is
    given, the recordings stay there, in a folder for each family.
    """
    matrix = known or Matrix()
    for family in families:
        row = matrix.cells.setdefault(family, {})
        missing = [case for case in cases if case.name not in row]
        if not missing:
            continue
        try:
            directory = model_directory(family)
        except PackageNotFetched as error:
            del matrix.cells[family]
            matrix.not_fetched[family] = str(error)
            continue
        with _folder(keep, family) as place, _served(family, directory, place) as served:
            async for name, cell in served.cells(missing, parallel):
                row[name] = cell
                progress(matrix, family, name)
    return matrix


@dataclass(frozen=True, slots=True)
class _Served:
    """A family behind a proxy."""

    family: str
    place: Path
    model: PlayedFamily
    policy: ShellPolicy
    url: str
    reader: Reader

    async def cells(
        self, cases: Sequence[HarnessCase], parallel: int
    ) -> AsyncIterator[tuple[str, Cell]]:
        """Yield each harness's cell when it is done; ``parallel`` of them run at once."""
        turns = asyncio.Semaphore(parallel)

        async def run(case: HarnessCase) -> tuple[str, Cell]:
            async with turns:
                try:
                    return case.name, await self.cell(case.name, case.adapter())
                except NotLaunchable as error:
                    return case.name, Cell.without_start(error)

        for done in asyncio.as_completed(map(run, cases)):
            yield await done

    async def cell(self, name: str, adapter: Adapter) -> Cell:
        """Run one session of the harness and judge its record. Raise ``NotLaunchable``."""
        settings = RolloutSettings(
            self.place / "sessions" / name, timeout_s=300.0, retries=0, keep_directories=True
        )
        async with Client(self.url) as client:
            fleet = LocalFleet(ProcessProvider(), WorkedThrough())
            rollout = Rollout(client, adapter, fleet, settings)
            results = await rollout.collect([Job(self.policy.task(f"{self.family}-{name}"))])
        figures = measured(self.reader, results, settings.directory)
        (result,) = results
        calls = list(self.reader.calls(result.session_id)) if result.session_id else []
        changed = {note.name for call in calls for note in call.notes} & FOR_TEMPLATES
        return Cell(
            rows=figures.rows,
            breaks=figures.breaks,
            unexplained=figures.unexplained,
            calls=figures.calls,
            problems=figures.problems,
            refused=self._refused(calls),
            changed=tuple(sorted(changed)),
        )

    def _refused(self, calls: Sequence[CallRow]) -> str:
        """Return the error with which the proxy refused the first call with tools, or ``""``."""
        if Continuer(self.model.tokenizer).roles.results:
            return ""
        # Some harnesses ask for a title first, without tools.
        work = [call for call in calls if tools(call)]
        if not work or any(call.status is CallStatus.COMPLETE for call in work):
            return ""
        return str(work[0].error.get("message") or work[0].reason)


@contextmanager
def _served(family: str, directory: Path, place: Path) -> Iterator[_Served]:
    policy = ShellPolicy(TURNS)
    model = PlayedFamily(Tokenizer(directory), FAMILIES[family], policy)
    store = str(place / "bench.db")
    with (
        ServerThread(app_of(model)) as engine,
        ProxyServer(ProxySettings(engine.base_url, store, tokenizer_dir=directory)) as proxy,
        Reader(store) as reader,
    ):
        yield _Served(family, place, model, policy, proxy.base_url, reader)


@contextmanager
def _folder(keep: Path | None, family: str) -> Iterator[Path]:
    if keep is not None:
        yield keep / family
        return
    with tempfile.TemporaryDirectory(prefix="bridle-matrix-") as scratch:
        yield Path(scratch)


_INTRODUCTION: Final = """\
# Harnesses on model families

Each harness ran unmodified through the proxy on the genuine chat template and tokenizer of each
family, with a scripted policy that thinks and asks for two shell commands at once, {turns} turns
long. A cell shows the rows per session and the number of breaks, all of them explained; *refused*
is a harness that the proxy refused at its first call. Small numbers name what the proxy changed in
the conversation for the template. Made by
`{command} --table docs/matrix.md`.
"""


def markdown(matrix: Matrix) -> str:
    """Return the matrix as the published page."""
    run = {name for row in matrix.cells.values() for name in row}
    names = [name for name in CASES if name in run]
    notes: dict[str, int] = {}
    command = "bridle bench matrix"
    if len(names) < len(CASES):
        command += "".join(f" --only {name}" for name in names)
    if matrix.cells.keys() < FAMILIES.keys():
        command += "".join(f" --family {name}" for name in matrix.cells)
    lines = [_INTRODUCTION.format(turns=TURNS, command=command)]
    lines += [f"| family | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for family in (name for name in FAMILIES if name in matrix.cells):
        row = matrix.cells[family]
        shown = (_shown(row[name], notes) if name in row else "–" for name in names)
        lines.append(f"| {family} | {' | '.join(shown)} |")
    lines += ["", *(f"{number}. `{note}`" for note, number in notes.items())]
    refused = Counter(cell.refused for row in matrix.cells.values() for cell in row.values())
    lines += ["", *(f"Refused ({n}): *{text}*" for text, n in refused.items() if text)]
    failures = matrix.failures()
    lines += ["", "Every cell is whole." if not failures else "What fails:", ""]
    lines += [f"- {failure}" for failure in failures]
    return "\n".join(lines).rstrip() + "\n"


def _shown(cell: Cell, notes: dict[str, int]) -> str:
    if cell.refused:
        return "refused"
    if cell.not_started:
        return "not started"
    numbers = sorted(notes.setdefault(note, len(notes) + 1) for note in cell.changed)
    marks = f" <sup>{','.join(map(str, numbers))}</sup>" if numbers else ""
    return f"{cell.rows}, {cell.breaks}{marks}"
