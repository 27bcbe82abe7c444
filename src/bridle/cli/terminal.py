"""Output of commands: tables, JSON, and the line that ends a command with an error."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn

import orjson
import typer
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from bridle.printable import printable

PIPED_WIDTH: Final = 120
"""The least width in columns if standard output is not a terminal."""
LEAST_WIDTH: Final = 11
"""The least width of the column that shrinks."""
_GAP: Final = 2


class Terminal(Console):
    """A console that prints text as it is: neither wrapped nor coloured by what it looks like.

    Recorded control characters are shown and not obeyed. Brackets and ``:names:`` are not markup,
    because names, paths and errors contain them.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(printable(text), style)


out = Terminal()
err = Terminal(stderr=True)
if not out.is_terminal:
    out.width = max(out.width, PIPED_WIDTH)
if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8 lacks some characters


@contextmanager
def paged() -> Iterator[None]:
    """Show the output of the context in the user's pager if standard output is a terminal.

    ``less`` shows colours, and ends by itself if all fits on the screen, unless the user has set
    its options.
    """
    if not out.is_terminal or not sys.stdin.isatty():
        yield
        return
    os.environ.setdefault("LESS", "FRX")
    with out.pager(styles=True):
        yield


class _PrintableLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def print_warnings() -> None:
    """Make control characters visible in warnings of libraries, which quote agents and engines."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_PrintableLines())


def print_json(value: Any) -> None:
    """Print ``value`` as one line of JSON on standard output, in UTF-8 whatever the terminal is."""
    typer.echo(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))


def plain_table(*headings: str) -> Table:
    """Return a table without lines. All columns but the first are aligned to the right."""
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if table.columns else "left")
    return table


def print_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    shrinks: str,
    spare: Sequence[str] = (),
    right: Collection[str] = (),
    under: Sequence[str] = (),
) -> None:
    """Print ``rows`` under ``headings``. Only cells of the column ``shrinks`` are ever cut.

    If the terminal is too narrow, columns of ``spare`` are left out, in their order, and named
    below the table. Columns in ``right`` are aligned to the right. ``under`` has a text for each
    row, which is printed below the row and cut at the terminal's edge.
    """
    lines = [[printable(cell, one_line=True) for cell in row] for row in rows]
    cells = zip(*lines, strict=True) if lines else [()] * len(headings)
    columns = dict(zip(headings, cells, strict=True))
    widths = {name: max(map(cell_len, (name, *found))) for name, found in columns.items()}
    whole = widths[shrinks]
    widths[shrinks] = min(whole, max(LEAST_WIDTH, cell_len(shrinks)))
    left_out = []
    for name in spare:
        if _line(widths) > out.width:
            del widths[name], columns[name]
            left_out.append(name)
    widths[shrinks] = min(whole, widths[shrinks] + max(0, out.width - _line(widths)))
    table = Table(box=None, pad_edge=False)
    for name, width in widths.items():
        table.add_column(
            name, justify="right" if name in right else "left", width=width, no_wrap=True
        )
    for row in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, row))
    if not under:
        out.print(table, width=_line(widths), crop=False)
    else:
        heading, *body = out.render_lines(
            table, out.options.update_width(_line(widths)), new_lines=True
        )
        out.print(Segments(heading), end="", crop=False)
        for line, text in zip(body, under, strict=True):
            out.print(Segments(line), end="", crop=False)
            if text:
                out.print(
                    Text(f"  {printable(text, one_line=True)}", style="dim"),
                    no_wrap=True,
                    overflow="ellipsis",
                    soft_wrap=False,
                )
    if left_out:
        out.print(Text(f"left out at {out.width} columns: {', '.join(left_out)}", style="dim"))


def counted(number: int, what: str) -> str:
    """Return ``number`` with the noun ``what``, whose plural has an ``s``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _line(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + _GAP * (len(widths) - 1)


def fail(message: str, code: int = 1) -> NoReturn:
    """End the command with ``message`` on standard error."""
    err.print(Text.assemble(("bridle:", "bold red"), f" {message}"))
    raise typer.Exit(code)
