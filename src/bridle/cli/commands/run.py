"""``bridle run -- CMD``: any command as one recorded session."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import ExitStack
from typing import Annotated

import typer

from bridle.cli.options import BudgetCalls, BudgetSeconds, BudgetTokens, ProxyOption
from bridle.cli.terminal import err, fail
from bridle.harnesses.client import (
    Client,
    ControlError,
    ProxyUnreachable,
    Session,
    SessionRequest,
)
from bridle.harnesses.interception import HOSTS, NoInterception, find_mitmdump, intercepted
from bridle.harnesses.run import run_command, seal_session, session_variables
from bridle.harnesses.sandboxes.base import NotLaunchable
from bridle.run.environment import admin_key_for
from bridle.run.rollouts import NO_CALL_HINT

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
NOT_FOUND = 127
"""What a shell exits with when it cannot start a command."""


def run(
    context: typer.Context,
    proxy: ProxyOption,
    name: Annotated[str | None, typer.Option(help="Name of the session.")] = None,
    harness: Annotated[
        str | None, typer.Option(help="Name of the harness. Default: the command's.")
    ] = None,
    budget_calls: BudgetCalls = None,
    budget_tokens: BudgetTokens = None,
    budget_seconds: BudgetSeconds = None,
    intercept: Annotated[
        bool,
        typer.Option("--intercept", help="Also record calls to the providers' own addresses."),
    ] = False,
    intercept_hosts: Annotated[
        list[str] | None,
        typer.Option("--intercept-host", help="Further address to record calls to. Repeatable."),
    ] = None,
    key: Annotated[
        str | None, typer.Option(envvar="BRIDLE_ADMIN_KEY", help="Admin key of the proxy.")
    ] = None,
) -> None:
    """Run a command as one recorded session: `bridle run -- python my_agent.py`."""
    key = admin_key_for(proxy, key)
    argv = context.args
    if not argv:
        fail("no command given, as in: bridle run -- python my_agent.py", 2)
    if shutil.which(argv[0]) is None:
        fail(f"cannot start {argv[0]}: there is no such command", NOT_FOUND)
    hosts = [*(HOSTS if intercept else ()), *(intercept_hosts or ())]
    if hosts:
        find_mitmdump()
    asked = {"calls": budget_calls, "tokens": budget_tokens, "wall_s": budget_seconds}
    budget = {name: value for name, value in asked.items() if value is not None}
    request = SessionRequest(
        name=name,
        harness=harness or argv[0].rsplit("/", 1)[-1],
        settings={"budget": budget} if budget else None,
    )
    session = asyncio.run(_create(proxy, key, request))
    try:
        with ExitStack() as stack:
            variables = session_variables(session)
            if hosts:
                variables |= stack.enter_context(intercepted(session, hosts))
            code = run_command(argv, variables)
    except (NotLaunchable, NoInterception) as error:
        asyncio.run(_seal(proxy, key, session, None))
        fail(str(error), NOT_FOUND if isinstance(error, NotLaunchable) else 1)
    err.print(asyncio.run(_seal(proxy, key, session, code)), highlight=False, soft_wrap=True)
    raise typer.Exit(code)


async def _create(proxy: str, key: str | None, request: SessionRequest) -> Session:
    async with Client(proxy, key) as client:
        return await client.create_session(request)


async def _seal(proxy: str, key: str | None, session: Session, code: int | None) -> str:
    """Seals the session; returns a line about it for the user."""
    async with Client(proxy, key) as client:
        problem = await seal_session(client, session, code)
        if problem:
            return f"bridle: session {session.id} could not be sealed: {problem}"
        try:
            recorded = await client.session(session.id)
        except (ProxyUnreachable, ControlError) as error:
            return f"bridle: recorded session {session.id}; its calls cannot be counted: {error}"
    counts = (f"{count} {status}" for status, count in recorded["calls"].items())
    calls = ", ".join(counts) or f"none ({NO_CALL_HINT})"
    return (
        f"bridle: recorded session {session.id}; calls: {calls}. "
        f"See it with `bridle show {session.id}`"
    )
