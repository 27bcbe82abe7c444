"""The examples that come with Bridle: in the repository, or inside the installed package."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from bridle.user_code import load_module

_PLACES = (
    Path(__file__).parents[1] / "_examples",
    Path(__file__).resolve().parents[3] / "examples",
)
_MARKS = ("*.py", "*.ipynb", "task.toml")
"""The files of which each example has one at its top: a program, a notebook, or a Harbor task."""


def example_directories() -> dict[str, Path]:
    place = next(place for place in _PLACES if place.is_dir())
    found = sorted({file.parent for kind in _MARKS for file in place.glob(f"*/{kind}")})
    return {each.name: each for each in found}


def example_directory(name: str) -> Path:
    """Return the directory of an example. Raise ``FileNotFoundError`` if it is not installed."""
    try:
        return example_directories()[name]
    except KeyError:
        raise FileNotFoundError(f"example {name!r} is not installed") from None


def load_example(name: str) -> tuple[Path, ModuleType]:
    """Return the directory of an example, and its ``tasks.py`` as a module."""
    directory = example_directory(name)
    return directory, load_module(str(directory / "tasks.py"))
