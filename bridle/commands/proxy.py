"""``bridle proxy``: record every call that goes through it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from bridle.config import DEFAULT_PORT
from bridle.options import JsonOption, StoreOption
from bridle.serving import announce, wait_for_signal
from bridle.terminal import fail
from store.records import Continuation

ADMIN_KEY_VARIABLE = "BRIDLE_ADMIN_KEY"
UPSTREAM_KEY_VARIABLE = "BRIDLE_UPSTREAM_API_KEY"


def proxy(
    engines: Annotated[
        list[str],
        typer.Option(
            "--engine", "--upstream", help="An engine's base URL; again for each one more."
        ),
    ],
    store: StoreOption,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = DEFAULT_PORT,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="The model's directory: makes exact continuation possible."),
    ] = None,
    continuation: Annotated[
        Continuation, typer.Option(help="How prompts are made, unless a session says.")
    ] = Continuation.EXACT,
    model: Annotated[
        str | None, typer.Option(help="The engine's model name; default: the first it lists.")
    ] = None,
    redact: Annotated[
        bool, typer.Option("--redact", help="Scrub keys and tokens from what is recorded as text.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Record agents: point their base URL at this proxy."""
    from bridle.feed import feed
    from proxy.server import ProxyServer
    from proxy.settings import ProxySettings, is_loopback
    from store.database import migrate

    admin_key = os.environ.get(ADMIN_KEY_VARIABLE)
    if admin_key is None and not is_loopback(host):
        fail(f"{host} is reachable by others: set {ADMIN_KEY_VARIABLE} to a key of your own")
    if "://" not in store:
        Path(store).parent.mkdir(parents=True, exist_ok=True)
    migrate(store)
    settings = ProxySettings(
        upstream_url=engines[0],
        more_engines=tuple(engines[1:]),
        store_url=store,
        host=host,
        port=port,
        admin_key=admin_key,
        upstream_api_key=os.environ.get(UPSTREAM_KEY_VARIABLE),
        model=model,
        tokenizer_dir=tokenizer,
        continuation=continuation,
        redact=redact,
    )
    with ProxyServer(settings, routers=[feed()]) as server:
        url = server.base_url
        announce(
            url,
            json,
            f"Bridle records to {store}, in front of {', '.join(engines)}",
            f"  OpenAI      OPENAI_BASE_URL={url}/v1",
            f"  Anthropic   ANTHROPIC_BASE_URL={url}",
            f"  Gemini      GOOGLE_GEMINI_BASE_URL={url}",
        )
        wait_for_signal()
