"""The settings of a training command, from its options and the file that the user names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import typer

from bridle.run.settings import SettingsError, parse_overrides, settings_from

Kind = TypeVar("Kind")

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
"""The options of a GRPO command that are settings: the name of a parameter, and of its setting."""
SFT: Final = {
    "epochs": "epochs",
    "batch_size": "batch_size",
    "seed": "seed",
    "learning_rate": "optimizer.learning_rate",
    "lora_rank": "lora.rank",
    **COMPUTE,
}
RUN: Final = {
    "named": "agent.name",
    "sandbox": "agent.sandbox",
    "sampling": "agent.sampling",
    "parallel": "agent.parallel",
    "fleet": "agent.fleet",
    "timeout": "agent.timeout_s",
    "tasks": "tasks.source",
    "split": "tasks.split",
    "verify": "tasks.verifier",
    "groups": "groups.per_step",
    "group_size": "groups.size",
    "policy": "policy.model",
    "evaluate_every": "evaluation.every",
    "evaluation_split": "evaluation.split",
    "engine": "policy.engine",
    "engine_arguments": "policy.engine_arguments",
    **{option: f"training.{setting}" for option, setting in GRPO.items()},
}
"""The options of ``bridle train`` that are settings of a :class:`bridle.run.config.RunConfig`."""


def chosen(
    context: typer.Context,
    kind: type[Kind],
    names: Mapping[str, str],
    file: Path | None,
    assignments: Sequence[str] = (),
) -> Kind:
    """Return a ``kind`` that is made from a command's options, a file and ``NAME=VALUE``
    assignments.

    ``names`` maps parameters to settings (``learning_rate``: ``optimizer.learning_rate``). An
    option that the user gives takes precedence over the file, and the file over an option's
    default. Assignments take precedence over all. Raise :class:`bridle.run.settings.SettingsError`.
    """
    options = {name: _plain(context.params.get(name)) for name in names}
    given = {name for name in names if _is_given(context, name)}
    return settings_from(
        kind,
        file,
        defaults={
            names[name]: value
            for name, value in options.items()
            if name not in given and value is not None
        },
        overrides={names[name]: options[name] for name in given} | parse_overrides(assignments),
    )


def part_options(assignments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the own options of the parts of a rollout, by the name of their part, from
    ``agent.options.PART.NAME=VALUE`` and ``tasks.options.PART.NAME=VALUE``.

    Raise :class:`bridle.run.settings.SettingsError` for any other setting.
    """
    options: dict[str, dict[str, Any]] = {}
    for name, value in parse_overrides(assignments).items():
        match name.split("."):
            case ["agent" | "tasks", "options", part, option]:
                options.setdefault(part, {})[option] = value
            case _:
                raise SettingsError(
                    f"a rollout has no setting {name!r}: name agent.options.PART.NAME (of the "
                    "agent, the sandbox or the fleet) or tasks.options.PART.NAME (of the verifier)"
                )
    return options


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
