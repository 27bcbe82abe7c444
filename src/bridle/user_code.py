"""Load Python code that a user names as ``FILE.py:NAME`` or ``MODULE:NAME``.

A file is loaded under a module name of its own, so that a user's ``trainer.py`` or ``json.py``
replaces no other module. Each file is loaded once per process, however often it is named.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from bridle.errors import UsageError


class UserCodeError(UsageError):
    """The named code does not exist or raised an error on loading; the message has the line."""


def load_object(named: str) -> Any:
    """Return the object that ``FILE.py:NAME`` or ``MODULE:NAME`` names.

    Raise :class:`UserCodeError` if it cannot be loaded.
    """
    place, separator, name = named.rpartition(":")
    if not separator:
        raise UserCodeError(f"{named!r} is not FILE.py:NAME or MODULE:NAME")
    module = load_module(place)
    if not hasattr(module, name):
        raise UserCodeError(f"{place} has no {name!r}")
    return getattr(module, name)


def load_module(place: str) -> ModuleType:
    """Return the module in a file (``FILE.py``) or with a dotted name.

    Raise :class:`UserCodeError` if it cannot be loaded.
    """
    try:
        return _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except UserCodeError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        file = next((frame.filename for frame in frames if frame.name == "<module>"), None)
        raise UserCodeError(f"cannot import {place}: {describe(error, file)}") from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserCodeError(f"module {path} does not exist")
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    name = f"bridle_user_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # noqa: S101 - a file that ends in .py has a loader
    assert spec.loader is not None  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up by its name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def describe_raised(error: BaseException, function: Any) -> str:
    """Return an error as one line, with the line of the file of ``function`` that raised it."""
    plain = inspect.unwrap(function.func if isinstance(function, partial) else function)
    place = inspect.getsourcefile(plain) if inspect.isfunction(plain) else None
    return describe(error, place)


def describe(error: BaseException, file: str | None) -> str:
    """Return an error as one line, with the line of ``file`` in which it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{text} ({file}, line {lines[-1]})" if lines else text
