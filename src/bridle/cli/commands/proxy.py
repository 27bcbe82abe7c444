"""``bridle proxy``: record every call that passes through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from bridle.cli.options import (
    HostOption,
    JsonOption,
    PortOption,
    StoreOption,
    base_urls,
    tokenizer_path,
)
from bridle.cli.serving import announce, listening_on, stop_signals, wait_for
from bridle.cli.settings import configured
from bridle.cli.terminal import fail
from bridle.keys import ADMIN_KEY_VARIABLE, UPSTREAM_KEY_VARIABLE
from bridle.proxy.settings import OtherModel, ProxyConfig, ProxySettings, is_loopback
from bridle.run.environment import DEFAULT_PORT, admin_key_file, key_files, key_in, made_admin_key
from bridle.run.other_models import require_urls, with_key
from bridle.run.upstream import Upstream, examine
from bridle.store.records import Continuation
from bridle.store.schema.database import migrate, shown

if TYPE_CHECKING:
    from fastapi import APIRouter

    from bridle.proxy.control.probes import Running
    from bridle.proxy.dialects.dialect import Provider
    from bridle.run.viewer_pages import ViewerPages
    from bridle.store.reading.queries import Reader

_PATIENCE_S: Final = 10.0
"""Seconds to wait until an engine that was started together with the proxy listens."""


_SHORTEST_KEY: Final = 16
"""Minimum characters of an admin key off loopback."""


@configured(ProxyConfig, {})
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
    config: ProxyConfig,
    host: HostOption = "127.0.0.1",
    port: PortOption = DEFAULT_PORT,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="The model's directory or its name on the Hub; exact continuation needs it. "
            "Default: what the engine names, if it is on this machine.",
            parser=tokenizer_path,
            metavar="MODEL",
        ),
    ] = None,
    external: Annotated[
        bool,
        typer.Option(
            "--external",
            help="The engine is any OpenAI-compatible API: record text, ask for no token ids.",
        ),
    ] = False,
    speaks: Annotated[
        list[str] | None,
        typer.Option(
            help="With --external, a dialect that the API serves itself: `messages`, `responses` "
            "or `google`. Requests in it are passed on as they are. Default: by its address.",
            metavar="DIALECT",
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, help="Processes behind the port; each serves every session.")
    ] = 1,
    viewer: Annotated[
        bool,
        typer.Option(
            "--viewer", help="Serve the store's pages under /bridle/viewer, for the admin key."
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Record every call of the agents whose base URL is this proxy."""
    from bridle.proxy.dialects.registry import providers, served
    from bridle.proxy.server import ProxyServer, tune_gc
    from bridle.proxy.workers import WorkerPool

    given_key = key_in(ADMIN_KEY_VARIABLE)
    if given_key is None and not is_loopback(host):
        fail(f"{host} is reachable by others: set {ADMIN_KEY_VARIABLE} to a key of your own")
    if given_key is not None and len(given_key) < _SHORTEST_KEY and not is_loopback(host):
        fail(
            f"{host} is reachable by others, who could guess {ADMIN_KEY_VARIABLE}: take a key of "
            f"at least {_SHORTEST_KEY} characters, such as `openssl rand -hex 16` prints"
        )
    upstream_key = key_in(UPSTREAM_KEY_VARIABLE)
    if external:
        config = _with_provider(config, engines, upstream_key, speaks)
    elif speaks:
        fail("--speaks is about an external API: add --external", 2)
    require_urls(config)
    config = replace(
        config,
        log_format=config.log_format or "text",
        other_models={
            name: with_key(f"other_models.{name}", one) for name, one in config.other_models.items()
        },
        routes={name: with_key(f"routes.{name}", one) for name, one in config.routes.items()},
    )
    try:
        settings = ProxySettings(
            upstream_url=engines[0],
            more_engines=tuple(engines[1:]),
            store_url=store,
            host=host,
            port=port,
            admin_key=given_key or made_admin_key(),
            keyless_recording=given_key is None,
            private_files=tuple(key_files()),
            upstream_api_key=upstream_key,
            tokenizer_dir=tokenizer,
            judge=_judge,
            **{one.name: getattr(config, one.name) for one in fields(ProxyConfig)},
        )
    except ValueError as error:
        fail(str(error), 2)
    spoken = providers(served(settings.dialects))
    migrate(store)
    found: list[Upstream] = []
    if not json:
        more = [url for urls in config.policies.values() for url in urls]
        found += _examined(engines, upstream_key, config.model, external)
        found += _examined(more, upstream_key, None, external=False)
    if tokenizer is None and not external and found:
        tokenizer = found[0].tokenizer
        settings = replace(settings, tokenizer_dir=tokenizer)
    pages = _viewer if viewer else None
    if workers > 1:
        with listening_on(host, port):
            several = WorkerPool(settings, workers, routers=[_feed], pages=pages)
        with several as pool:
            _announce(pool.base_url, json, settings, spoken, found, viewer)
            pool.serve()
        return
    tune_gc()
    with listening_on(host, port):
        single = ProxyServer(settings, routers=[_feed], pages=pages)
    stop = stop_signals()
    with single as server:
        _announce(server.base_url, json, settings, spoken, found, viewer)
        wait_for(stop)


def _with_provider(
    config: ProxyConfig, engines: Sequence[str], key: str | None, speaks: Sequence[str] | None
) -> ProxyConfig:
    """Return ``config`` with ``engines`` as the model of every call, recorded as text."""
    dialects = tuple(speaks) if speaks else None
    provider = OtherModel(tuple(engines), config.model, key, external=True, dialects=dialects)
    return replace(
        config,
        other_models={**config.other_models, "*": provider},
        # A provider has no health route; its calls show how it is.
        limits=replace(config.limits, health_check_s=0),
    )


def _feed() -> APIRouter:
    """Import and return the feed's routes, when the control API is first asked for."""
    from bridle.run.feed import feed

    return feed()


def _judge(reader: Reader, session_id: str) -> None:
    """Import the judgement when a session is first sealed, and judge the session."""
    from bridle.reconstruct.verdicts import judge

    judge(reader, session_id)


def _viewer(running: Running) -> ViewerPages:
    """Import and return the viewer's pages, when a page is first asked for."""
    from bridle.run.viewer_pages import viewer_pages

    return viewer_pages(running)


def _examined(
    engines: list[str], key: str | None, model: str | None, external: bool
) -> list[Upstream]:
    return [
        examine(url, api_key=key, model=model, external=external, wait_s=_PATIENCE_S)
        for url in engines
    ]


def _announce(
    url: str,
    json: bool,
    settings: ProxySettings,
    spoken: Sequence[Provider],
    found: list[Upstream],
    viewer: bool,
) -> None:
    """Print what a client needs, and which features are on and off, with reasons and remedies."""
    engines = ", ".join(settings.engine_urls)
    announce(
        url,
        json,
        f"Bridle records to {shown(settings.store_url)}, in front of {engines}",
        *(
            f"  {provider.name:<11} {provider.url_variables[0]}={provider.base_url(url)}"
            for provider in reversed(spoken)
            if provider.url_variables
        ),
        f"  keys        {_keys(settings)}",
        f"  continuation {_continuation(settings)}",
        *(
            f"  policy      {name}, served by {', '.join(urls)}"
            for name, urls in settings.policies.items()
        ),
        *(f"  upstream    {_verdict(each)}" for each in found),
        *((f"  viewer      {url}/bridle/viewer (asks for the admin key)",) if viewer else ()),
    )


def _keys(settings: ProxySettings) -> str:
    if settings.keyless:
        return f"recording needs none on this machine; control: {admin_key_file()}"
    return f"every request needs a session's key, or the one in {ADMIN_KEY_VARIABLE}"


def _continuation(settings: ProxySettings) -> str:
    if settings.other_models.get("*") is not None and settings.other_models["*"].external:
        return "off: an external API takes no token ids"
    if settings.continuation is not Continuation.EXACT:
        return "rendered, as configured: histories are tokenised again at each call"
    if settings.tokenizer_dir is None:
        return "off: name the model with --tokenizer DIRECTORY or OWNER/MODEL"
    from bridle.run.examination import examine_template

    if broken := examine_template(settings.tokenizer_dir)["broken"]:
        return f"off: {broken}"
    return f"exact, with the tokenizer in {settings.tokenizer_dir}"


def _verdict(upstream: Upstream) -> str:
    of = f"{upstream.url}{f' ({upstream.model})' if upstream.model else ''}"
    if upstream.problem:
        return f"{of}: {upstream.problem}"
    if upstream.token_ids is None:
        return f"{of}: recorded as text; nothing of it can be trained"
    return f"{of}: returns token ids"
