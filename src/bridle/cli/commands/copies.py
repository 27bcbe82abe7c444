"""``bridle backup``, ``export-db`` and ``import-db``: copy a store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.options import JsonOption, StoreOption
from bridle.cli.reading import require_store
from bridle.cli.terminal import fail, out, print_json
from bridle.store.operations.copying import backup as write_backup
from bridle.store.operations.copying import copy_store


def backup(
    file: Annotated[Path, typer.Argument(help="The SQLite file to write.")],
    store: StoreOption,
    json: JsonOption = False,
) -> None:
    """Copy the store into one file, also while a proxy writes to it."""
    require_store(store)
    try:
        size = write_backup(store, file)
    except FileExistsError as error:
        fail(str(error))
    if json:
        print_json({"file": str(file), "bytes": size})
    else:
        out.print(f"{file}: {size:,} bytes")


def export_db(
    target: Annotated[str, typer.Argument(help="SQLite path or database URL; empty, or new.")],
    store: StoreOption,
    json: JsonOption = False,
) -> None:
    """Copy the store into another database, such as PostgreSQL."""
    _copy(store, target, json)


def import_db(
    source: Annotated[str, typer.Argument(help="SQLite path or database URL to read.")],
    store: StoreOption,
    json: JsonOption = False,
) -> None:
    """Copy another database into the store, which must be empty."""
    _copy(source, store, json)


def _copy(source: str, target: str, json: bool) -> None:
    require_store(source)
    rows = copy_store(source, target)
    if json:
        print_json(rows)
    else:
        copied = ", ".join(f"{count} {name}" for name, count in rows.items() if count)
        out.print(f"Copied {copied or 'nothing'}.")
