"""``bridle import``: record conversations of other programs as sessions."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.options import JsonOption, StoreOption
from bridle.cli.terminal import counted, fail, out, print_json
from bridle.reconstruct.imports.formats import IMPORTS, recognised
from bridle.reconstruct.imports.turns import NotReadable
from bridle.reconstruct.imports.writing import ImportReport, record
from bridle.store.reading.queries import Reader
from bridle.store.schema.database import migrate
from bridle.store.writing.writer import Writer


def import_(
    files: Annotated[
        list[Path], typer.Argument(help="Files, or folders whose .jsonl files are read.")
    ],
    store: StoreOption,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="chat, atif, claude-code, codex, otel, an installed one, or FILE.py:NAME; by "
            "default as the first line shows.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Record transcripts, JSONL or spans of other programs as sessions.

    They have no token ids: export them and fine-tune on them. Sessions that the store has are left
    out.
    """
    paths = [(one, file.is_dir()) for file in files for one in _files(file)]
    if not paths:
        fail("no file is there to import: folders are searched for .jsonl files", 2)
    migrate(store)
    report = ImportReport()
    with Reader(store) as reader, Writer(store) as writer:
        for path, searched in paths:
            try:
                name = form or recognised(path)
                done = record(IMPORTS.get(name)(path), name, writer, reader)
            except NotReadable:
                if not searched:
                    raise
                report.left_out["not_readable"] += 1
                continue
            report.sessions += done.sessions
            report.calls += done.calls
            report.left_out += done.left_out
    if json:
        print_json(_as_data(report))
        return
    out.print(f"{counted(len(report.sessions), 'session')}, {counted(report.calls, 'call')}")
    for reason, count in report.left_out.items():
        out.print(f"  left out: {count} {reason}")


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.rglob("*.jsonl"))
    if not path.is_file():
        fail(f"{path} is neither a file nor a folder", 2)
    return [path]


def _as_data(report: ImportReport) -> dict[str, list[str] | int | Counter[str]]:
    return {
        "sessions": report.sessions,
        "calls": report.calls,
        "left_out": report.left_out,
    }
