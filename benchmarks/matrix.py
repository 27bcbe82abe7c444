"""``bridle bench matrix``: every installed harness on every family's template, cell by cell.

A cell is one session of a harness, unmodified, through the real proxy, with a family's genuine
template and tokenizer. Its policy thinks and asks for two commands in each of six turns. The
recording is rebuilt and audited. A cell is one row without an unexplained break, or the proxy has
refused the harness at its first call, with the reason.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bridle.bench.families import FAMILIES, model_directory
from bridle.bench.harness_cases import CASES, HarnessCase
from bridle.bench.harnesses import Figures, measured
from bridle.bench.packages import PackageNotFetched
from bridle.bench.played_engine import app_of
from bridle.bench.played_family import PlayedFamily
from bridle.bench.shell_policy import ShellPolicy, WorkedThrough
from bridle.engine.contract.tokenizer import Tokenizer
from bridle.engine.serve.transport import ServerThread
from bridle.harnesses.client import Client
from bridle.harnesses.fleet import LocalFleet
from bridle.harnesses.rollout import Job, Rollout, RolloutSettings
from bridle.harnesses.sandboxes import ProcessProvider
from bridle.proxy.continuation.continuation import Continuer
from bridle.proxy.continuation.roles import FOR_TEMPLATES
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.reconstruct.conversation import tools
from bridle.store.reading.queries import CallRow, Reader
from bridle.store.records import CallStatus

TURNS: Final = 6
SAMPLE: Final = ("qwen3.5", "llama3.3", "gemma3")
"""The families of the sample that is run where all of them would take too long."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A harness on a family's template."""

    figures: Figures
    refused: str = ""
    """The reason why the proxy refused the harness at its first call with tools."""
    changed: frozenset[str] = frozenset()
    """The names of the notes on what was changed for the template."""
    engine_refusals: tuple[str, ...] = ()
    """The messages of the template for the prompts that it refused after all."""

    @property
    def failures(self) -> list[str]:
        """One line for each requirement that the cell fails."""
        if self.refused:
            return []
        found = [*self.figures.problems]
        found += [f"the template refused: {text}" for text in self.engine_refusals]
        if self.figures.rows != self.figures.sessions:
            found.append(f"{self.figures.rows} rows of {self.figures.sessions} session")
        if self.figures.unexplained:
            found.append(f"{self.figures.unexplained} unexplained breaks")
        return found

    def as_data(self) -> dict[str, Any]:
        return {
            **self.figures.as_data(),
            "refused": self.refused,
            "changed": sorted(self.changed),
            "engine_refusals": list(self.engine_refusals),
            "failures": self.failures,
        }


@dataclass(slots=True)
class Matrix:
    """All cells by family and harness, and the families whose template could not be fetched."""

    cells: dict[str, dict[str, Cell]] = field(default_factory=dict)
    not_fetched: dict[str, str] = field(default_factory=dict)

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
    timeout_s: float = 300.0,
    keep: Path | None = None,
    progress: Callable[[str, str, Cell], None] = lambda family, name, cell: None,
) -> Matrix:
    """Run every harness on every family. Raise ``NotLaunchable`` if one is not installed.

    If ``keep`` is given, the recordings stay there, in a folder for each family.
    """
    matrix = Matrix()
    adapters = [(case.name, case.adapter()) for case in cases]
    for family in families:
        try:
            directory = model_directory(family)
        except PackageNotFetched as error:
            matrix.not_fetched[family] = str(error)
            continue
        row = matrix.cells.setdefault(family, {})
        with _folder(keep, family) as place:
            policy = ShellPolicy(TURNS)
            model = PlayedFamily(Tokenizer(directory), FAMILIES[family], policy)
            store = str(place / "bench.db")
            with (
                ServerThread(app_of(model)) as engine,
                ProxyServer(
                    ProxySettings(engine.base_url, store, tokenizer_dir=directory)
                ) as proxy,
                Reader(store) as reader,
            ):
                for name, adapter in adapters:
                    settings = RolloutSettings(
                        place / "sessions" / name,
                        timeout_s=timeout_s,
                        retries=0,
                        keep_directories=True,
                    )
                    model.refusals.clear()
                    async with Client(proxy.base_url) as client:
                        fleet = LocalFleet(ProcessProvider(), WorkedThrough())
                        rollout = Rollout(client, adapter, fleet, settings)
                        results = await rollout.collect([Job(policy.task(f"{family}-{name}"))])
                    figures = measured(reader, results, settings.directory)
                    (result,) = results
                    calls = list(reader.calls(result.session_id)) if result.session_id else []
                    row[name] = _cell(figures, calls, model)
                    progress(family, name, row[name])
    return matrix


def _cell(figures: Figures, calls: Sequence[CallRow], model: PlayedFamily) -> Cell:
    refused = ""
    # Some harnesses ask for a title first, without tools.
    work = [call for call in calls if tools(call)]
    if work and not any(call.status is CallStatus.COMPLETE for call in work):
        rules = Continuer(model.tokenizer).roles
        refused = work[0].reason or work[0].status
        if not rules.results:
            refused += ": the template raises on tool calls and their results"
    changed = {note.name for call in calls for note in call.notes} & FOR_TEMPLATES
    return Cell(figures, refused, frozenset(changed), tuple(dict.fromkeys(model.refusals)))


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
    names = list(dict.fromkeys(name for row in matrix.cells.values() for name in row))
    notes: dict[str, int] = {}
    only = [] if {*CASES} == {*names} else [f" --only {name}" for name in names]
    command = f"bridle bench matrix{''.join(only)}"
    lines = [_INTRODUCTION.format(turns=TURNS, command=command)]
    lines += [f"| family | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for family, row in matrix.cells.items():
        shown = (_shown(row[name], notes) if name in row else "–" for name in names)
        lines.append(f"| {family} | {' | '.join(shown)} |")
    lines += ["", *(f"{number}. `{note}`" for note, number in notes.items())]
    refused = Counter(cell.refused for row in matrix.cells.values() for cell in row.values())
    lines += ["", *(f"Refused ({n}): {text}" for text, n in refused.items() if text)]
    failures = matrix.failures()
    lines += ["", "Every cell is whole." if not failures else "What fails:", ""]
    lines += [f"- {failure}" for failure in failures]
    return "\n".join(lines).rstrip() + "\n"


def _shown(cell: Cell, notes: dict[str, int]) -> str:
    if cell.refused:
        return "refused"
    numbers = sorted(notes.setdefault(note, len(notes) + 1) for note in cell.changed)
    marks = f" <sup>{','.join(map(str, numbers))}</sup>" if numbers else ""
    return f"{cell.figures.rows}, {cell.figures.breaks}{marks}"
