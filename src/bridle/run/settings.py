"""Settings in layers: defaults, a TOML file over them, and single values over both."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from bridle.errors import UsageError

Kind = TypeVar("Kind")
_FIELD: Final = re.compile(
    r'^    (\w+):[^\n]*(?:\n(?!    \w)[^\n]*)*?\n    """(.*?)"""', re.MULTILINE | re.DOTALL
)
"""A field of a class, and the text below it."""


class SettingsError(UsageError, ValueError):
    """A settings file cannot be read, or a setting is unknown, missing or out of range."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a configuration: a field of it, or of a dataclass inside it."""

    name: str
    """Its dotted name, such as ``optimizer.learning_rate``."""
    type: Any
    default: Any
    """Its default, as JSON has it, or ``dataclasses.MISSING``."""
    doc: str
    """The text below the field."""


def settings_of(kind: Any) -> Iterator[Setting]:
    """Yield every setting of ``kind``, a dataclass of dataclasses."""
    return _settings_below(kind, _defaults(kind), "")


def _settings_below(kind: Any, defaults: Mapping[str, Any], prefix: str) -> Iterator[Setting]:
    types, docs = get_type_hints(kind), field_docs(kind)
    for field in fields(kind):
        name, default = f"{prefix}{field.name}", defaults.get(field.name, MISSING)
        if is_dataclass(types[field.name]):
            yield from _settings_below(types[field.name], default, f"{name}.")
        else:
            yield Setting(name, types[field.name], default, docs.get(field.name, ""))


def field_docs(kind: Any) -> dict[str, str]:
    """Return the text below each field of a class, by the field's name."""
    found = _FIELD.findall(inspect.getsource(kind))
    return {name: " ".join(text.split()) for name, text in found}


def settings_from(
    kind: type[Kind],
    file: Path | None = None,
    *,
    defaults: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Kind:
    """Return a ``kind``, a frozen dataclass of dataclasses, from its layers.

    ``defaults`` replace those of the dataclass, ``file`` replaces both, and ``overrides`` replace
    all. The mappings go from dotted names (``optimizer.learning_rate``) to values. A text among
    ``overrides`` is read as :func:`parsed` describes.

    Raise :class:`SettingsError`.
    """
    where = str(file or "the settings")
    values = _defaults(kind)
    _overlay(values, nested(defaults or {}))
    if file is not None:
        _overlay(values, _read(file, kind))
    types = {setting.name: setting.type for setting in settings_of(kind)}
    above = nested(
        {name: parsed(value, types.get(name, Any)) for name, value in (overrides or {}).items()}
    )
    _require_known(above, kind, "the settings")
    _overlay(values, above)
    _require_complete(values, kind, where)
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$.")
        named = f"{place.rstrip('`')}: " if place else ""
        raise SettingsError(f"{where}: {named}{reason}") from error


def parse_overrides(assignments: Sequence[str]) -> dict[str, str]:
    """Return ``a.b=VALUE`` texts as a mapping from dotted names to the texts of values.

    Raise :class:`SettingsError`.
    """
    values = {}
    for assignment in assignments:
        name, separator, text = assignment.partition("=")
        if not separator or not name:
            raise SettingsError(f"{assignment!r} is not NAME=VALUE")
        values[name] = text
    return values


def parsed(value: Any, kind: Any) -> Any:
    """Return the value of a setting of type ``kind``.

    A text is read as TOML (``3``, ``true``, ``["a"]``), unless it is not TOML or the setting is a
    text. An empty text stands for ``None`` if the setting may be that. Other values are returned
    as they are.
    """
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if not isinstance(value, str):
        return value
    if not value and type(None) in kinds:
        return None
    try:
        read = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value
    return read if isinstance(read, str) or str not in kinds else value


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``{"a.b": 1}`` as ``{"a": {"b": 1}}``."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        place = found
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return found


def _defaults(kind: type) -> dict[str, Any]:
    types = get_type_hints(kind)
    found: dict[str, Any] = {}
    for field in fields(kind):
        if not _required(field):
            value = field.default if field.default_factory is MISSING else field.default_factory()
            found[field.name] = msgspec.to_builtins(value)
        elif is_dataclass(types[field.name]):
            found[field.name] = _defaults(types[field.name])
    return found


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _read(file: Path, kind: type) -> dict[str, Any]:
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{file}: {error}") from error
    _require_known(values, kind, str(file))
    return values


def _require_known(values: Mapping[str, Any], kind: type, where: str) -> None:
    types = get_type_hints(kind)
    known = {field.name: types[field.name] for field in fields(kind)}
    for name, value in values.items():
        if name not in known:
            raise SettingsError(f"{where}: there is no setting {name!r}, but {', '.join(known)}")
        if not isinstance(value, dict):
            continue
        if is_dataclass(known[name]):
            _require_known(value, known[name], f"{where} [{name}]")
        elif is_dataclass(item := (None, *get_args(known[name]))[-1]) and isinstance(item, type):
            for key, one in value.items():
                if isinstance(one, dict):
                    _require_known(one, item, f"{where} [{name}.{key}]")


def _require_complete(values: Any, kind: Any, where: str, prefix: str = "") -> None:
    types = get_type_hints(kind)
    for field in fields(kind):
        name = f"{prefix}{field.name}"
        if is_dataclass(types[field.name]):
            inner = values.get(field.name)
            if isinstance(inner, dict):
                _require_complete(inner, types[field.name], where, f"{name}.")
        elif field.name not in values:
            raise SettingsError(f"{where}: {name} is not set")


def _overlay(below: dict[str, Any], above: Mapping[str, Any]) -> None:
    for name, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(name), dict):
            _overlay(below[name], value)
        else:
            below[name] = value
