"""The example agents that come with Bridle: in the repository, or inside the installed package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_PLACES = (
    Path(__file__).with_name("_examples"),
    Path(__file__).parent.parent / "examples",
)


def example_directory(name: str) -> Path:
    """Where an example lies. Raises ``FileNotFoundError``."""
    directory = next((place / name for place in _PLACES if (place / name).is_dir()), None)
    if directory is None:
        raise FileNotFoundError(f"example {name!r} is not installed")
    return directory


def load_example(name: str) -> tuple[Path, ModuleType]:
    """The directory of an example, and its ``tasks.py`` as a module."""
    directory = example_directory(name)
    spec = importlib.util.spec_from_file_location(f"{name}_tasks", directory / "tasks.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"example {name!r} has no tasks.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return directory, module
