"""``bridle status``: what a running proxy is doing."""

from __future__ import annotations

from typing import Annotated, Any

import httpx
import typer

from bridle.options import JsonOption, ProxyOption
from bridle.terminal import fail, out, print_json, print_table


def status(
    proxy: ProxyOption,
    key: Annotated[
        str | None, typer.Option(envvar="BRIDLE_ADMIN_KEY", help="Admin key of the proxy.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show a running proxy's policy version, its gate and its engines."""
    found = {name: _get(proxy, key, name) for name in ("policy", "engines")}
    if json:
        print_json(found)
        return
    policy = found["policy"]
    gate = "paused" if policy["paused"] else "open"
    out.print(
        f"policy version {policy['version']}; gate {gate}; "
        f"{policy['running']} calls run, {policy['waiting']} wait",
        highlight=False,
    )
    shown = {
        "engine": "name",
        "circuit": "circuit",
        "version": "policy_version",
        "changed": "changed",
        "usable": "usable",
        "running": "running",
        "retries": "retries",
        "ejections": "ejections",
    }
    rows = [[str(engine[field]) for field in shown.values()] for engine in found["engines"]]
    print_table(list(shown), rows, shrinks="engine", spare=("retries",))


def _get(proxy: str, key: str | None, name: str) -> Any:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        reply = httpx.get(f"{proxy}/bridle/v1/{name}", headers=headers, trust_env=False)
        reply.raise_for_status()
    except httpx.HTTPError as error:
        fail(f"{proxy}: {error}. Is `bridle proxy` running?")
    return reply.json()
