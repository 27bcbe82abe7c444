"""The settings of a training command: from a TOML file, and over it those of its options."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, get_type_hints

import msgspec
import typer

from bridle.errors import UsageError

Settings = TypeVar("Settings")

COMPUTE: Final = {name: f"compute.{name}" for name in ("device", "precision", "recompute")}
GRPO: Final = {
    "steps": "steps",
    "seconds": "seconds",
    "minibatches": "minibatches",
    "max_staleness": "max_staleness",
    "seed": "seed",
    "learning_rate": "optimizer.learning_rate",
    "schedule": "optimizer.schedule",
    "publish_through": "publish.through",
    "transfer_address": "publish.transfer_address",
    "transfer_backend": "publish.transfer_backend",
    "lora_rank": "lora.rank",
    **COMPUTE,
}
SFT: Final = {
    "epochs": "epochs",
    "batch_size": "batch_size",
    "seed": "seed",
    "learning_rate": "optimizer.learning_rate",
    "lora_rank": "lora.rank",
    **COMPUTE,
}
"""The settings that are options too, by the options' names."""


class SettingsError(UsageError, ValueError):
    """The file cannot be read, or says something that is no setting; the message names it."""


def chosen(
    context: typer.Context, kind: type[Settings], names: Mapping[str, str], file: Path | None
) -> Settings:
    """A ``kind``, which is a dataclass of dataclasses, from a command's options and ``file``.

    ``names`` says which setting an option is (``learning_rate``: ``optimizer.learning_rate``).
    An option that the user has named wins over the file, and the file over an option's default.
    Raises :class:`SettingsError`.
    """
    said = _as_data(kind())
    options = {names[name]: value for name, value in context.params.items() if name in names}
    _overlay(said, _nested(options))
    _overlay(said, {} if file is None else _read(file, kind))
    _overlay(said, _nested({names[name]: context.params[name] for name in _named(context, names)}))
    try:
        return msgspec.convert(said, kind)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{file or 'the settings'}: {error}") from error


def _named(context: typer.Context, names: Iterable[str]) -> list[str]:
    """Those options that the user has given."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]


def _as_data(settings: object) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.to_builtins(settings)
    return data


def _read(file: Path, kind: type) -> dict[str, Any]:
    try:
        said = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{file}: {error}") from error
    _require_known(said, kind, str(file))
    return said


def _require_known(said: Mapping[str, Any], kind: type, where: str) -> None:
    types = get_type_hints(kind)
    known = {field.name: types[field.name] for field in fields(kind)}
    for name, value in said.items():
        if name not in known:
            raise SettingsError(f"{where}: there is no setting {name!r}, but {', '.join(known)}")
        if is_dataclass(known[name]) and isinstance(value, dict):
            _require_known(value, known[name], f"{where} [{name}]")


def _nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """``{"a.b": 1}`` as ``{"a": {"b": 1}}``."""
    nested: dict[str, Any] = {}
    for name, value in options.items():
        *path, last = name.split(".")
        place = nested
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return nested


def _overlay(below: dict[str, Any], above: Mapping[str, Any]) -> None:
    for name, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(name), dict):
            _overlay(below[name], value)
        else:
            below[name] = value
