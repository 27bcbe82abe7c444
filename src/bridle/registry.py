"""The one idiom of every open set: parts that a user names, from Bridle or from elsewhere.

Exports, dialects, sandboxes, adapters, losses and the like are open sets. A user names a part of
one in three forms:

- a built-in name, such as ``chat``
- the name of an entry point in the group of the set, such as ``bridle.exports``, which any
  installed distribution can have
- ``FILE.py:NAME`` or ``MODULE:NAME``

A part is imported when it is first asked for, so that a command loads only the parts that it uses.

A part brings its own options as a frozen dataclass: the part itself, if it is one, or else the type
of its parameter ``options``, which has a default. A configuration states them by the part's name;
that of ``FILE.py:NAME`` is ``NAME``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from importlib import metadata
from typing import Any, Generic, TypeVar, cast, get_type_hints

import msgspec

from bridle.errors import BridleError, UsageError
from bridle.user_code import UserCodeError, describe, describe_raised, load_object

Part = TypeVar("Part")
Options = Mapping[str, Mapping[str, Any]]
"""Values of options by name, by the name of their part."""


class UnknownPart(UsageError, ValueError):
    """No part has the name, several parts have it, or it cannot be registered."""


class UnknownOption(UsageError, ValueError):
    """A part has no option of the name, or the option cannot have the value."""


class PartFailed(UsageError):
    """A part failed its trial on made-up arguments."""


class Unjudged(BridleError, LookupError):
    """Made-up arguments lack a fact that a part asks for, so its trial shows nothing."""


class Registry(Generic[Part]):
    """The parts of one kind by name."""

    def __init__(self, kind: str, group: str, built_in: Mapping[str, str] | None = None) -> None:
        """Make the set of a ``kind``, which error messages name, such as ``loss``.

        ``group`` is the group of its entry points, such as ``bridle.losses``. ``built_in`` maps
        names to ``MODULE:NAME``, which is imported when the part is first asked for.
        """
        self.kind, self.group = kind, group
        self._built_in = dict(built_in or {})
        self._parts: dict[str, Part] = {}
        self._objects: set[str] = set()
        """Names of the parts that were registered as objects."""

    def register(self, name: str, part: Part) -> Part:
        """Add a part under a name, and return it.

        Raise :class:`UnknownPart` if the name has a colon or belongs to another built-in or
        registered part.
        """
        if ":" in name or not name:
            raise UnknownPart(f"a name has at least one character and no colon, not {name!r}")
        if name in self._built_in or self._parts.get(name, part) is not part:
            raise UnknownPart(f"there is a {self.kind} {name!r} already: choose another name")
        self._parts[name] = part
        self._objects.add(name)
        return part

    def registered(self, name: str) -> Callable[[Part], Part]:
        """Return a decorator that adds a part under a name, as :meth:`register` does."""
        return lambda part: self.register(name, part)

    def get(self, name: str) -> Part:
        """Return the part that ``name`` names, in one of the three forms.

        Raise :class:`UnknownPart` if there is none, and :class:`bridle.user_code.UserCodeError` if
        its code cannot be loaded.
        """
        if name not in self._parts:
            if ":" in name:
                named: Part = load_object(name)
                return named
            own = self._built_in.get(name)
            self._parts[name] = load_object(own) if own else self._installed(name)
        return self._parts[name]

    def reference(self, name: str) -> str | None:
        """Return ``FILE.py:NAME`` or ``MODULE:NAME`` of a part, by which another process loads it.

        Return ``None`` for a part that was registered as an object of this process.
        """
        if ":" in name or name in self._built_in:
            return self._built_in.get(name, name)
        if name in self._objects:
            return None
        found = {one.value for one in metadata.entry_points(group=self.group, name=name)}
        return found.pop() if len(found) == 1 else None

    def configured(self, name: str, options: Options) -> Part:
        """Return the part that ``name`` names, with its options bound if ``options`` has any.

        Raise :class:`UnknownOption`, and the errors of :meth:`get`.
        """
        part = self.get(name)
        own = options.get(name.rpartition(":")[2])
        return self._bound(name, part, own) if own else part

    def tried(self, name: str, options: Options, *arguments: object) -> Any:
        """Return what the part ``name``, a function, returns for made-up arguments.

        Raise :class:`PartFailed` if it raises an error, except for :class:`Unjudged`. An assertion
        of the part is about real arguments, so that made-up ones that fail it show nothing.
        """
        part = cast(Callable[..., Any], self.configured(name, options))
        try:
            return part(*arguments)
        except Unjudged:
            raise
        except AssertionError as error:
            raise Unjudged(name) from error
        except Exception as error:
            raise self.failed(name, f"raises {describe_raised(error, part)}") from error

    def failed(self, name: str, reason: str) -> PartFailed:
        """Return the error of a part whose trial failed for ``reason``."""
        return PartFailed(f"the {self.kind} {name!r} {reason}")

    def names(self) -> list[str]:
        """Return the names of the built-in and registered parts, and those of entry points.

        The former are in the order of their registration, and the latter follow them.
        """
        installed = sorted(metadata.entry_points(group=self.group).names)
        return list(dict.fromkeys([*self._built_in, *self._parts, *installed]))

    @property
    def forms(self) -> str:
        """The forms in which a part is named, for messages and help."""
        return f"FILE.py:NAME or one of {', '.join(self.names())}"

    def _installed(self, name: str) -> Part:
        found = {one.value: one for one in metadata.entry_points(group=self.group, name=name)}
        if not found:
            raise UnknownPart(
                f"there is no {self.kind} {name!r}: name {self.forms} (an installed distribution "
                f"adds one by an entry point of {self.group})"
            )
        if len(found) > 1:
            raise UnknownPart(
                f"several distributions have a {self.kind} {name!r}, "
                f"{' and '.join(sorted(_origin(one) for one in found.values()))}: uninstall all "
                "but one, or name MODULE:NAME"
            )
        (one,) = found.values()
        try:
            part: Part = one.load()
        except Exception as error:
            raise UserCodeError(
                f"cannot load the {self.kind} {name!r} ({one.value}) of {_origin(one)}: "
                f"{describe(error, None)}"
            ) from error
        return part

    def _bound(self, name: str, part: Part, values: Mapping[str, Any]) -> Part:
        kind = options_of(part)
        known = [] if kind is None else [field.name for field in fields(kind)]
        for each in values:
            if each not in known:
                has = f"but {', '.join(known)}" if known else "and none at all"
                raise UnknownOption(f"the {self.kind} {name!r} has no option {each!r}, {has}")
        try:
            made = msgspec.convert(values, cast(type[Any], kind))
        except msgspec.ValidationError as error:
            raise UnknownOption(f"options of the {self.kind} {name!r}: {error}") from error
        bound = (lambda: made) if kind is part else partial(cast(Any, part), options=made)
        return cast(Part, bound)


def require_parts(options: Options, *named: tuple[Registry[Any], str]) -> None:
    """Raise the errors of :meth:`Registry.configured` for parts that are named.

    Raise :class:`UnknownPart` if ``options`` has any for a name that no part of their kinds has.
    """
    for registry, name in named:
        registry.configured(name, options)
    chosen = {name.rpartition(":")[2]: None for _, name in named}
    for name in options.keys() - chosen.keys():
        known = dict.fromkeys([*chosen, *(each for one, _ in named for each in one.names())])
        if name not in known:
            raise UnknownPart(f"options are for {name!r}, which is none of {', '.join(known)}")


def options_of(part: object) -> type[Any] | None:
    """Return the dataclass of a part's own options, or ``None`` if it has none."""
    if isinstance(part, type):
        return part if is_dataclass(part) else None
    if "options" not in getattr(part, "__annotations__", {}):
        return None
    kind: type[Any] = get_type_hints(part)["options"]
    return kind


def _origin(entry_point: metadata.EntryPoint) -> str:
    return entry_point.dist.name if entry_point.dist is not None else entry_point.value
