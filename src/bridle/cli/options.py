"""Command-line options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from bridle.errors import UsageError
from bridle.keys import ADMIN_KEY_VARIABLE
from bridle.run.environment import EngineKind, default_proxy, default_store, is_base_url
from bridle.store.reward import RewardSource

Given = TypeVar("Given", str, list[str], str | None)


def base_urls(option: typer.CallbackParam, value: Given) -> Given:
    """Return the value of an option that takes base URLs; used as its callback.

    Raise :class:`bridle.errors.UsageError` for a text that is not a URL.
    """
    for text in [value] if isinstance(value, str) else value or ():
        if not is_base_url(text):
            raise UsageError(
                f"{'/'.join(option.opts)} {text!r} is not a URL such as http://127.0.0.1:8000"
            )
    return value


def model_path(text: str) -> Path:
    """Parse an option that names a model by its directory or its name on the Hub.

    Return the directory.
    """
    from bridle.run.hub import model_directory

    return _found(model_directory, text)


def tokenizer_path(text: str) -> Path:
    """Parse such an option like :func:`model_path`, for a command that needs only the tokenizer."""
    from bridle.run.hub import tokenizer_directory

    return _found(tokenizer_directory, text)


def _found(directory: Callable[[str], Path], model: str) -> Path:
    try:
        return directory(model)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from error


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

KeyOption = Annotated[
    str | None, typer.Option("--key", envvar=ADMIN_KEY_VARIABLE, help="Admin key of the proxy.")
]

HostOption = Annotated[str, typer.Option("--host", help="Address to listen on.")]
PortOption = Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")]

RunOption = Annotated[str | None, typer.Option("--run", help="Only this run's sessions.")]
HarnessOption = Annotated[
    str | None, typer.Option("--harness", help="Only this harness's sessions.")
]

RewardSourcesOption = Annotated[
    list[RewardSource] | None,
    typer.Option(
        "--reward-source",
        help="Whose rewards count. Default: as the run states, else the verifier's.",
    ),
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]

BudgetCalls = Annotated[
    int | None, typer.Option("--budget-calls", min=0, help="Maximum calls per session.")
]
BudgetTokens = Annotated[
    int | None,
    typer.Option("--budget-tokens", min=0, help="Maximum sampled tokens per session."),
]
BudgetSeconds = Annotated[
    float | None,
    typer.Option(
        "--budget-seconds", min=0, help="Maximum seconds from a session's start to its last call."
    ),
]

EngineOption = Annotated[
    EngineKind,
    typer.Option("--engine", help="Engine that serves the policy; vllm: docs/vllm.md."),
]

CheckOption = Annotated[
    str | None,
    typer.Option(
        "--check",
        help="Shell command that is run in a sibling's copy of the folder; its exit status 0 is "
        "success, the reward 1. For sessions of `bridle run`.",
    ),
]
ResetOption = Annotated[
    bool, typer.Option("--reset", help="Reset each copy to the recorded Git commit.")
]
