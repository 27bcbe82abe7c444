"""Check the language of docstrings, which ``make check`` runs.

A docstring opens with a verb or a noun, never with a free relative ("What …") or a fragment
("Of …"). Arguments are folders and files, by default all rooms. Print each finding as
``FILE:LINE: why``; exit with 1 if there are any.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

ROOMS: Final = (
    "proxy",
    "reconstruct",
    "diagnosis",
    "store",
    "engine",
    "harnesses",
    "trainer",
    "recipes",
    "src",
    "benchmarks",
    "examples",
    "tests",
    "docs",
)
OPENINGS: Final = re.compile(
    r"(What|Who|Whose|Whom|Whether|Which|Whichever|Whoever|Whatever|Those|That|Of|By|As|From|For|To|In|On"
    r"|At|With|Without|Beside|Before|After|Among|Because|Where|When|Why|How)\b"
)
"""First words that begin a fragment or a free relative."""


def documented(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring, those below fields and constants included."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for statement in body:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text


def findings(path: Path) -> Iterator[str]:
    """Yield a line for each docstring of a file that opens wrongly."""
    for line, text in documented(ast.parse(path.read_text(encoding="utf-8"))):
        opening = text.strip()
        if match := OPENINGS.match(opening):
            yield f"{path}:{line}: opens with {match[0]!r}: {opening.splitlines()[0]}"


def sources(places: Iterable[Path]) -> Iterator[Path]:
    """Yield the Python files of folders and files, links and installed packages left out."""
    for place in places:
        for folder, names, files in os.walk(place):
            names[:] = [each for each in names if each != "node_modules" and each[0] != "."]
            yield from (Path(folder, each) for each in sorted(files) if each.endswith(".py"))
        if place.is_file():
            yield place


def main() -> int:
    """Check the places that the command line names."""
    places = [Path(each) for each in sys.argv[1:]] or [Path(room) for room in ROOMS]
    lines = [each for path in sources(places) for each in findings(path)]
    for line in lines:
        print(line)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
