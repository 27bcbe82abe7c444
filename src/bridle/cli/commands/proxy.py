"""``bridle proxy``: record every call that passes through."""

from __future__ import annotations

import socket
from enum import StrEnum
from itertools import filterfalse
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import urlsplit

import typer

from bridle.cli.options import (
    BudgetCalls,
    BudgetSeconds,
    BudgetTokens,
    JsonOption,
    StoreOption,
    base_urls,
)
from bridle.cli.serving import announce, listening_on, wait_for_signal
from bridle.cli.terminal import err, fail
from bridle.proxy.settings import shown_limits
from bridle.run.environment import (
    ADMIN_KEY_VARIABLE,
    DEFAULT_PORT,
    UPSTREAM_KEY_VARIABLE,
    key_in,
    made_admin_key,
)
from bridle.store.records import Continuation
from bridle.store.schema.database import migrate, shown

if TYPE_CHECKING:
    from fastapi import APIRouter

_PATIENCE_S: Final = 2.0


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class Synchronous(StrEnum):
    NORMAL = "NORMAL"
    FULL = "FULL"


def proxy(
    engines: Annotated[
        list[str],
        typer.Option(
            "--engine",
            "--upstream",
            callback=base_urls,
            help="Base URL of an engine. Repeatable.",
        ),
    ],
    store: StoreOption,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = DEFAULT_PORT,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="The model's directory; exact continuation needs it.",
        ),
    ] = None,
    continuation: Annotated[
        Continuation, typer.Option(help="How prompts of sessions are made that set nothing else.")
    ] = Continuation.EXACT,
    model: Annotated[
        str | None,
        typer.Option(help="The engine's name of the model. Default: the first it lists."),
    ] = None,
    other_models: Annotated[
        list[str] | None,
        typer.Option(
            "--other-model",
            help="Send a model elsewhere: NAME=URL[,model=THEIRS][,key=VARIABLE][,external]. "
            "NAME may be a pattern; recorded, never trained.",
        ),
    ] = None,
    role_models: Annotated[
        list[str] | None,
        typer.Option("--role-model", help="ROLE=NAME of an --other-model; ROLE may be `subagent`."),
    ] = None,
    budget_calls: BudgetCalls = None,
    budget_tokens: BudgetTokens = None,
    budget_seconds: BudgetSeconds = None,
    workers: Annotated[
        int, typer.Option(min=1, help="Processes behind the port; each serves every session.")
    ] = 1,
    memory: Annotated[
        int | None,
        typer.Option(min=1, help="MiB of memory for sessions in use, per process. Default: 48."),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option("--limit", help=f"NAME=VALUE. Repeatable. Defaults: {shown_limits()}."),
    ] = None,
    synchronous: Annotated[
        Synchronous,
        typer.Option(
            help="SQLite's setting: NORMAL survives a killed process, FULL also a power failure."
        ),
    ] = Synchronous.NORMAL,
    log_format: Annotated[
        LogFormat, typer.Option(help="Format of log lines on standard error.")
    ] = LogFormat.TEXT,
    log_level: Annotated[
        LogLevel, typer.Option(help="Lowest level that is logged; info has a line for each call.")
    ] = LogLevel.WARNING,
    otel: Annotated[
        bool,
        typer.Option(
            "--otel", help="Send OpenTelemetry spans to the OTEL_* address; needs the otel extra."
        ),
    ] = False,
    redact: Annotated[
        bool, typer.Option("--redact", help="Remove keys and secrets from recorded text.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Record every call of the agents whose base URL is this proxy."""
    from bridle.proxy.server import ProxyServer, tune_gc
    from bridle.proxy.settings import Budget, ProxySettings, is_loopback, limits_from
    from bridle.proxy.workers import WorkerPool
    from bridle.run.other_models import other_model, pair

    given_key = key_in(ADMIN_KEY_VARIABLE)
    if given_key is None and not is_loopback(host):
        fail(f"{host} is reachable by others: set {ADMIN_KEY_VARIABLE} to a key of your own")
    try:
        settings = ProxySettings(
            upstream_url=engines[0],
            more_engines=tuple(engines[1:]),
            store_url=store,
            synchronous=synchronous.value,
            host=host,
            port=port,
            admin_key=given_key or made_admin_key(),
            keyless_recording=given_key is None,
            upstream_api_key=key_in(UPSTREAM_KEY_VARIABLE),
            model=model,
            tokenizer_dir=tokenizer,
            continuation=continuation,
            other_models=dict(other_model(text) for text in other_models or ()),
            role_models=dict(pair(text, "--role-model") for text in role_models or ()),
            budget=Budget(budget_calls, budget_tokens, budget_seconds),
            limits=limits_from(dict(pair(text, "--limit") for text in limit or ()), memory),
            redact=redact,
            log_format=log_format.value,
            log_level=log_level.value,
            tracing=otel,
        )
    except ValueError as error:
        fail(str(error), 2)
    migrate(store)
    if workers > 1:
        with listening_on(host, port):
            several = WorkerPool(settings, workers, routers=[_feed])
        with several as pool:
            _announce(pool.base_url, json, store, engines)
            pool.serve()
        return
    tune_gc()
    with listening_on(host, port):
        single = ProxyServer(settings, routers=[_feed])
    with single as server:
        _announce(server.base_url, json, store, engines)
        wait_for_signal()


def _feed() -> APIRouter:
    """Imported when the control API is first asked for."""
    from bridle.run.feed import feed

    return feed()


def _announce(url: str, json: bool, store: str, engines: list[str]) -> None:
    for silent in filterfalse(_listens, engines):
        err.print(
            f"bridle: no engine listens at {silent} yet; calls fail until one does",
            highlight=False,
            soft_wrap=True,
        )
    announce(
        url,
        json,
        f"Bridle records to {shown(store)}, in front of {', '.join(engines)}",
        f"  OpenAI      OPENAI_BASE_URL={url}/v1",
        f"  Anthropic   ANTHROPIC_BASE_URL={url}",
        f"  Gemini      GOOGLE_GEMINI_BASE_URL={url}",
    )


def _listens(engine: str) -> bool:
    """Whether something accepts connections there: shows a wrong port before an agent fails."""
    url = urlsplit(engine)
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        socket.create_connection((url.hostname, port), timeout=_PATIENCE_S).close()
    except OSError:
        return False
    return True
