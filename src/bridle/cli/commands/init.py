"""``bridle init``: write an agent, tasks, a verifier and a run.toml that train at once."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.terminal import fail, out
from bridle.run.examples import example_directory

_STARTER = "starter"


def init(
    folder: Annotated[Path, typer.Argument(help="Folder to write into.")] = Path(),
) -> None:
    """Write an agent, tasks, a verifier and a run.toml to train with.

    Existing files are never overwritten.
    """
    files = sorted(file for file in example_directory(_STARTER).iterdir() if file.is_file())
    if there := [file.name for file in files if (folder / file.name).exists()]:
        fail(f"{', '.join(there)} is in {folder.resolve()} already: name another folder", 2)
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copyfile(file, folder / file.name)
    out.print(f"wrote {', '.join(file.name for file in files)} to {folder.resolve()}")
    into = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    out.print(f"train:  {into}bridle train --config run.toml --out runs/first")
    out.print("look:   bridle viewer --store runs/first/bridle.db")
