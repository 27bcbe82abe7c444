"""The options of a command that are settings of a configuration.

A command names the few settings that have an option of their own. The option's choices, default and
help are those of the dataclass's field. ``--config FILE`` and ``--set NAME=VALUE`` set all others.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, get_args, get_origin

import typer

from bridle.run.settings import Setting, parse_overrides, settings_from, settings_of

Command = TypeVar("Command", bound=Callable[..., None])
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        exists=True,
        dir_okay=False,
        help="TOML file with settings; options replace its values.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Any other setting; the site's page on settings lists them. Repeatable.",
    ),
]
_OTHER_NAMES: Final = {
    "groups": "groups_per_step",
    "minutes": "seconds",
    "evaluation_tasks": "evaluation_source",
    "settings": "config",
    "otel": "tracing",
    "budget_tokens": "budget",
    "budget_seconds": "budget",
}
"""Likely names of options whose setting has a name that is too different to be found by it."""
_SYNONYMS: Final = {"--model": "--policy", "--policy": "--model"}
"""Options that some commands have under the other name."""


def configured(kind: type, flags: Mapping[str, str]) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator for a command with a parameter ``config`` of the dataclass ``kind``.

    ``--config``, ``--set`` and the options of ``flags``, which maps each (``--steps``) to its
    setting (``training.steps``), take the parameter's place. ``--set`` takes precedence over
    options, and options over the file. The command raises
    :class:`bridle.run.settings.SettingsError` for a value that the configuration does not take.
    """
    known = {setting.name: setting for setting in settings_of(kind)}
    parameters = {flag.lstrip("-").replace("-", "_"): flag for flag in flags}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(config: Path | None, assignments: list[str] | None, **given: Any) -> None:
            asked = {flags[flag]: given.pop(name) for name, flag in parameters.items()}
            overrides = {name: value for name, value in asked.items() if value not in (None, [])}
            overrides |= parse_overrides(assignments or ())
            command(config=settings_from(kind, config, overrides=overrides), **given)

        own = inspect.signature(command, eval_str=True).parameters
        options = {name: _option(flag, known[flags[flag]]) for name, flag in parameters.items()}
        options |= {"config": ConfigOption, "assignments": SetOption}
        shown = [one for one in own.values() if one.name != "config"]
        shown += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
            for name, option in options.items()
        ]
        vars(run).pop("__wrapped__")
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in shown]
        )
        run.__annotations__ = {one.name: one.annotation for one in shown}
        run.shown_settings = {  # type: ignore[attr-defined]
            **{name: f"--set {name}=VALUE" for name in known},
            **{name: flag for flag, name in flags.items()},
            "config": "--config",
        }
        return run

    return decorate


def settable(place: str) -> Callable[[Command], Command]:
    """Return a decorator for a command whose ``--set`` takes the settings of a dataclass.

    ``place`` is the dataclass's ``MODULE:NAME``, which is imported when its settings are listed.
    """

    def decorate(command: Command) -> Command:
        vars(command)["settings_at"] = place
        return command

    return decorate


def shown_settings(command: Any) -> Mapping[str, str]:
    """Return the option that sets each setting of a click command, by the setting's name."""
    callback = getattr(command, "callback", None)
    if (place := getattr(callback, "settings_at", None)) is None:
        return getattr(callback, "shown_settings", {})
    module, _, name = place.partition(":")
    kind = getattr(import_module(module), name)
    return {setting.name: f"--set {setting.name}=VALUE" for setting in settings_of(kind)}


def replacements(error: Any) -> list[str]:
    """Return the options that set what the unknown option of a click error seems to mean.

    An example is ``--set training.seed=VALUE`` for ``--seed``. There may be none.
    """
    option = getattr(error, "option_name", "")
    command: Any = error.ctx.command if error.ctx else None
    settings = shown_settings(command)
    known = {each for one in getattr(command, "params", ()) for each in one.opts}
    if option not in known and (synonym := _SYNONYMS.get(option)) in known:
        return [str(synonym)]
    if not settings or option in known:
        return []
    asked = option.lstrip("-").replace("-", "_")
    asked = _OTHER_NAMES.get(asked, asked)
    tails = [(tail, shown) for name, shown in settings.items() for tail in _tails(name)]
    names = {tail for tail, _ in tails}
    close = difflib.get_close_matches(asked, names, 3, 0.9)
    close = close or difflib.get_close_matches(asked, names, 1, 0.65)
    return list(dict.fromkeys(shown for tail, shown in tails if tail in close))


def _tails(name: str) -> Iterator[str]:
    """Yield ``a_b_c``, ``b_c`` and ``c`` for the dotted name ``a.b.c``."""
    parts = name.split(".")
    for first in range(len(parts)):
        yield "_".join(parts[first:])


def _option(flag: str, setting: Setting) -> Any:
    """Return the type of the parameter for an option that sets ``setting``."""
    kinds = (setting.type, *get_args(setting.type))
    choices = next((one for one in kinds if get_origin(one) is Literal), None)
    kind = list[str] if get_origin(setting.type) is tuple else choices or str
    if setting.type is bool:
        kind = bool
    default = setting.default
    option = typer.Option(
        flag,
        metavar=None if choices or kind is bool else "INTEGER" if int in kinds else "TEXT",
        help=setting.doc.split(". ")[0].rstrip(".").replace("``", "") + ".",
        show_default=False if default in (None, MISSING, "", [], False) else str(default),
    )
    return Annotated[kind | None, option]
