"""``bridle status``: print the state of a running proxy."""

from __future__ import annotations

import asyncio
from typing import Any

from bridle.cli.options import JsonOption, KeyOption, ProxyOption
from bridle.cli.terminal import out, print_json, print_table
from bridle.harnesses.client import Client
from bridle.run.environment import admin_key_for


def status(
    proxy: ProxyOption,
    key: KeyOption = None,
    json: JsonOption = False,
) -> None:
    """Show a running proxy's policy version, gate and engines."""
    key = admin_key_for(proxy, key)
    found = asyncio.run(_ask(proxy, key))
    if json:
        print_json(found)
        return
    policy = found["policy"]
    gate = "paused" if policy["paused"] else "open"
    out.print(
        f"policy version {policy['version']}; gate {gate}; "
        f"{policy['running']} calls run, {policy['waiting']} wait"
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
    for engine in found["engines"]:
        if difference := engine["rendering_difference"]:
            line = f"{engine['name']}: {difference}; its calls are not continued exactly"
            out.print(line)


async def _ask(proxy: str, key: str | None) -> dict[str, Any]:
    async with Client(proxy, key) as client:
        return {"policy": await client.policy(), "engines": await client.engines()}
