"""Parts of a training run by name: advantages, losses, filters, optimizers.

A configuration names a part that is registered, or a function of the user's as ``FILE.py:NAME`` or
``MODULE:NAME``. With several devices a run's processes import the built-in parts only, so there a
user's own part is given as ``FILE.py:NAME``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from bridle.errors import UsageError
from bridle.user_code import load_object

Part = TypeVar("Part", bound=Callable[..., object])


class UnknownPart(UsageError, ValueError):
    """A configuration names a part that is not registered, or a name is registered twice."""


class Registry(Generic[Part]):
    """Functions of one kind by name."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._parts: dict[str, Part] = {}

    def register(self, name: str) -> Callable[[Part], Part]:
        """Return a decorator that registers a function. Raises :class:`UnknownPart` for a taken
        name."""

        def add(part: Part) -> Part:
            if ":" in name or not name:
                raise UnknownPart(f"a name has at least one character and no colon, not {name!r}")
            if self._parts.setdefault(name, part) is not part:
                raise UnknownPart(f"there is a {self._kind} {name!r} already")
            return part

        return add

    def __iter__(self) -> Iterator[str]:
        """Iterate over the registered names."""
        return iter(self._parts)

    def find(self, name: str) -> Part:
        """Return the part that ``name`` names.

        Raises :class:`UnknownPart`, and :class:`bridle.user_code.UserCodeError` for a file.
        """
        if name in self._parts:
            return self._parts[name]
        if ":" in name:
            part: Part = load_object(name)
            return part
        raise UnknownPart(
            f"there is no {self._kind} {name!r}: name FILE.py:NAME or one of " + ", ".join(self)
        )
