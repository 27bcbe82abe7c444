"""``bridle worker``: run sessions for a trainer elsewhere."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.options import TASKS_HELP, JsonOption, ProxyOption, SamplingOption, SandboxOption
from bridle.cli.serving import announce, listening_on
from bridle.cli.terminal import err, fail
from bridle.run.environment import ADMIN_KEY_VARIABLE, admin_key_for

DEFAULT_PORT = 8485


def worker(
    named: Annotated[
        str,
        typer.Option("--agent", help="codex, claude-code …, agent.py, or 'CMD {prompt}'."),
    ],
    tasks: Annotated[str, typer.Option(help=TASKS_HELP)],
    proxy: ProxyOption,
    verify: Annotated[
        str, typer.Option("--verifier", help="task, number, exact, regex, or FILE.py:NAME.")
    ] = "task",
    split: Annotated[str | None, typer.Option(help="Only tasks of this split.")] = None,
    sandbox: SandboxOption = None,
    sampling: SamplingOption = "policy",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = DEFAULT_PORT,
    parallel: Annotated[int, typer.Option(min=1, help="Sessions at a time.")] = 16,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Longest time of one session, in seconds.")
    ] = 600.0,
    model: Annotated[str, typer.Option(help="Model name that the harness asks for.")] = "policy",
    directory: Annotated[Path, typer.Option(help="Workspaces and logs.")] = Path("runs/worker"),
    seed: Annotated[int, typer.Option(help="Order of tasks; use the same for all workers.")] = 0,
    json: JsonOption = False,
) -> None:
    """Run sessions of a harness when `bridle trainer` asks for them over HTTP."""
    from bridle.harnesses.rollout import RolloutSettings
    from bridle.harnesses.sampling import session_settings
    from bridle.proxy.server import local_url
    from bridle.proxy.settings import is_loopback
    from bridle.run.agents import agent, shuffled_tasks, verifier
    from bridle.run.worker import Duties, serve

    key = admin_key_for(proxy)
    if key is None and not is_loopback(host):
        fail(f"{host} is reachable by others: set {ADMIN_KEY_VARIABLE} to the proxy's key", 2)
    check, pool = verifier(verify), shuffled_tasks(tasks, split, seed)
    adapter, place = agent(named, sandbox, pool)
    settings = RolloutSettings(
        directory=directory,
        parallel=parallel,
        timeout_s=timeout,
        model=model,
        session_settings=session_settings(sampling),
    )
    duties = Duties(proxy, adapter, place, check, pool, settings, key)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with listening_on(host, port):
        listening = socket.create_server((host, port), family=family)
    with listening as listener:
        url = local_url(host, listener.getsockname()[1])
        announce(url, json, f"Worker for {adapter.name} on {url}, {len(pool)} tasks")
        serve(duties, listener, lambda line: err.print(line, highlight=False))
