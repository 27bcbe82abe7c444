"""Settings in layers: defaults, a TOML file that replaces them, and single values that replace
both."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from bridle.errors import UsageError

Kind = TypeVar("Kind")


class SettingsError(UsageError, ValueError):
    """A settings file cannot be read, or a setting is unknown, missing or out of range."""


def settings_from(
    kind: type[Kind],
    file: Path | None = None,
    *,
    defaults: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Kind:
    """Return a ``kind``, a frozen dataclass of dataclasses, from its layers.

    ``defaults`` replace those of the dataclass, ``file`` replaces both, and ``overrides`` replace
    all. The mappings go from dotted names (``optimizer.learning_rate``) to values.

    Raise :class:`SettingsError`.
    """
    where = str(file or "the settings")
    values = _defaults(kind)
    _overlay(values, nested(defaults or {}))
    if file is not None:
        _overlay(values, _read(file, kind))
    above = nested(overrides or {})
    _require_known(above, kind, "the settings")
    _overlay(values, above)
    _require_complete(values, kind, where)
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{where}: {error}") from error


def parse_overrides(assignments: Sequence[str]) -> dict[str, Any]:
    """Return ``a.b=VALUE`` texts as a mapping from dotted names to values.

    A value is read as TOML (``3``, ``true``, ``["a"]``), or else kept as text. Raise
    :class:`SettingsError`.
    """
    found: dict[str, Any] = {}
    for assignment in assignments:
        name, separator, text = assignment.partition("=")
        if not separator or not name:
            raise SettingsError(f"{assignment!r} is not NAME=VALUE")
        try:
            found[name] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            found[name] = text
    return found


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
        if (moved := getattr(kind, "MOVED", {}).get(name)) is not None:
            raise SettingsError(f"{where}: the setting {name!r} is {moved} now")
        if name not in known:
            raise SettingsError(f"{where}: there is no setting {name!r}, but {', '.join(known)}")
        if not isinstance(value, dict):
            continue
        if is_dataclass(known[name]):
            _require_known(value, known[name], f"{where} [{name}]")
        elif is_dataclass(item := get_args(known[name])[-1]) and isinstance(item, type):
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
