"""``bridle examples``: list the examples that come with Bridle, or copy one."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path
from typing import Annotated

import orjson
import typer

from bridle.cli.terminal import fail, out, print_table
from bridle.run.examples import example_directories

_TARGET = "examples"


def examples(
    name: Annotated[
        str | None, typer.Argument(help="The example to copy. Default: list all.")
    ] = None,
    to: Annotated[Path, typer.Option(help="Folder to copy into.")] = Path(_TARGET),
) -> None:
    """List the examples, or copy one into this folder."""
    found = example_directories()
    if name is None:
        rows = [(each, _summary(directory)) for each, directory in found.items()]
        print_table(("example", "what it is"), rows, shrinks="what it is")
        return
    if name not in found:
        fail(f"there is no example {name!r}: {', '.join(found)}", 2)
    target = to / name
    if target.exists():
        out.print(f"{target} is there already")
        return
    shutil.copytree(found[name], target, ignore=shutil.ignore_patterns("__pycache__"))
    out.print(f"copied to {target}")


def _summary(directory: Path) -> str:
    """Return the first line that describes an example.

    It is that of its notebook, of the page of its Harbor task, or of the docstring of its first
    program.
    """
    for notebook in directory.glob("*.ipynb"):
        first = orjson.loads(notebook.read_bytes())["cells"][0]["source"]
        return "".join(first).partition("\n")[0].lstrip("# ")
    if (directory / "task.toml").is_file():
        text = (directory / "README.md").read_text(encoding="utf-8")
        return text.partition("\n")[0].lstrip("# ")
    program = min(directory.glob("*.py"), key=lambda path: (path.name != "agent.py", path.name))
    text = ast.get_docstring(ast.parse(program.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]
