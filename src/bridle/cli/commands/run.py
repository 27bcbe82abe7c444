"""``bridle run -- CMD``: run any command as one recorded session."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Annotated

import typer

from bridle.cli.options import BudgetCalls, BudgetSeconds, BudgetTokens, KeyOption, ProxyOption
from bridle.cli.terminal import err, fail
from bridle.harnesses.adapters import Configurable, configurable
from bridle.harnesses.client import (
    Client,
    ControlError,
    ProxyUnreachable,
    Session,
    SessionRequest,
)
from bridle.harnesses.install import (
    NotLaunchable,
    find_harness,
    find_python_harness,
)
from bridle.harnesses.interception import HOSTS, NoInterception, find_mitmdump, intercepted
from bridle.harnesses.run import launch_variables, run_command, seal_session
from bridle.harnesses.sampling import AGENT, session_settings
from bridle.harnesses.started import how_started, installed_version, workspace_commit
from bridle.run.environment import admin_key_for
from bridle.run.rollouts import NO_CALL_HINT

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
_INSTALL = {
    "codex": "npm install -g @openai/codex",
    "claude": "npm install -g @anthropic-ai/claude-code",
    "qwen": "npm install -g @qwen-code/qwen-code",
    "gemini": "npm install -g @google/gemini-cli",
    "pi": "npm install -g @earendil-works/pi-coding-agent",
    "opencode": "npm install -g opencode-ai",
    "mini": "pip install mini-swe-agent",
}
NOT_FOUND = 127
"""The exit status with which a shell reports that it cannot start a command."""


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
    sampling: Annotated[
        str,
        typer.Option(
            help="`policy` pins the policy's own distribution, `temperature=0.7,top_p=0.8` other "
            "values; `agent` leaves sampling to the harness.",
        ),
    ] = AGENT,
    intercept: Annotated[
        bool,
        typer.Option("--intercept", help="Also record calls to the providers' own addresses."),
    ] = False,
    intercept_hosts: Annotated[
        list[str] | None,
        typer.Option("--intercept-host", help="Further address to record calls to. Repeatable."),
    ] = None,
    configure: Annotated[
        bool,
        typer.Option(
            help="Configure codex, claude, qwen, gemini, pi, opencode or mini for the session, "
            "apart from your own settings."
        ),
    ] = True,
    key: KeyOption = None,
) -> None:
    """Run a command as one recorded session: bridle run -- codex."""
    key = admin_key_for(proxy, key)
    argv = context.args
    if not argv:
        fail("no command given, as in: bridle run -- python my_agent.py", 2)
    hosts = [*(HOSTS if intercept else ()), *(intercept_hosts or ())]
    program = PurePath(argv[0]).name
    known = configurable(program) if configure and not hosts else None
    argv = [_found(argv[0], known), *argv[1:]]
    if hosts:
        find_mitmdump()
    pins = session_settings(sampling)
    asked = {"calls": budget_calls, "tokens": budget_tokens, "wall_s": budget_seconds}
    budget = {name: value for name, value in asked.items() if value is not None}
    request = SessionRequest(
        name=name,
        harness=harness or (program if known is None else known.name),
        settings={**pins, **({"budget": budget} if budget else {})} or None,
        start=replace(
            how_started(argv, os.getcwd(), os.environ),
            harness_version=installed_version(argv[0]),
            workspace_commit=workspace_commit(os.getcwd()),
        ),
    )
    session = asyncio.run(create(proxy, key, request))
    try:
        code = launch(session, argv, known, hosts)
    except (NotLaunchable, NoInterception) as error:
        asyncio.run(seal(proxy, key, session, None, ""))
        fail(str(error), NOT_FOUND if isinstance(error, NotLaunchable) else 1)
    remedy = _remedy(program, known, bool(hosts))
    if program == "codex" and code and _outside_git(argv[1:]):
        remedy = "Codex works outside a Git repository only with `codex exec --skip-git-repo-check`"
    said = asyncio.run(seal(proxy, key, session, code, remedy))
    err.print(said)
    raise typer.Exit(code)


def launch(
    session: Session,
    argv: Sequence[str],
    known: Configurable | None,
    hosts: Sequence[str] = (),
    places: Mapping[str, str] | None = None,
) -> int:
    """Run a command as a session, and return its exit code.

    ``known`` is the harness that is configured for it, ``hosts`` are the addresses whose calls are
    intercepted, and ``places`` are further variables. Raise :class:`NotLaunchable` or
    :class:`NoInterception`.
    """
    with ExitStack() as stack:
        variables = stack.enter_context(launch_variables(session, argv, known, places))
        if hosts:
            variables |= stack.enter_context(intercepted(session, hosts))
        return run_command(argv, variables)


async def create(proxy: str, key: str | None, request: SessionRequest) -> Session:
    """Return a new session of the proxy."""
    async with Client(proxy, key) as client:
        return await client.create_session(request)


def _found(command: str, known: Configurable | None) -> str:
    """Return the path of the command, or end ``bridle run`` if there is none.

    The command is searched for in ``PATH``, and among the harnesses that ``harnesses/*/install``
    put here.
    """
    if (found := shutil.which(command)) is not None:
        return found
    if known is None:
        fail(f"cannot start {command}: there is no such command", NOT_FOUND)
    try:
        if command == "mini":
            return find_python_harness(known.name, command)
        return find_harness(command)
    except NotLaunchable as error:
        fail(f"cannot start {command}: {error}, or `{_INSTALL[command]}`", NOT_FOUND)


def _outside_git(arguments: Sequence[str]) -> bool:
    """Return whether ``codex ARGUMENTS`` refuses to start: its folder is in no Git repository."""
    if "exec" not in arguments and "e" not in arguments:
        return False  # on a terminal Codex asks
    if {"--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"} & set(arguments):
        return False
    folder = Path.cwd()
    for name, value in pairwise(arguments):
        if name in ("-C", "--cd"):
            folder /= value
    folder = folder.resolve()
    return not any((each / ".git").exists() for each in (folder, *folder.parents))


def _remedy(program: str, known: Configurable | None, intercepted: bool) -> str:
    """Return what to do if the command made no call."""
    if intercepted:
        return (
            "it ignores HTTPS_PROXY, pins a certificate, or asks another address, which "
            "--intercept-host adds"
        )
    if known is not None:
        return (
            f"{program} was configured for this session, so it ended before it asked its model, "
            "or its own options chose another provider: leave those out, or use --intercept"
        )
    if configurable(program) is not None:
        return "--no-configure leaves its own settings in place: leave it out, or use --intercept"
    return f"{NO_CALL_HINT} If it has a fixed address, use --intercept"


async def seal(proxy: str, key: str | None, session: Session, code: int | None, remedy: str) -> str:
    """Seal the session. Return a line about it for the user, with ``remedy`` if it has no call."""
    async with Client(proxy, key) as client:
        problem = await seal_session(client, session, code)
        if problem:
            return f"bridle: session {session.id} could not be sealed: {problem}"
        try:
            recorded = await client.session(session.id)
            first = await client.first_calls(session.id)
        except (ProxyUnreachable, ControlError) as error:
            return f"bridle: recorded session {session.id}; its calls cannot be counted: {error}"
    counts = (f"{count} {status}" for status, count in recorded["calls"].items())
    calls = ", ".join(counts) or f"none ({remedy})"
    greedy = sum(call["sampling"].get("temperature") == 0 for call in first)
    return (
        f"bridle: recorded session {session.id}; calls: {calls}. "
        f"See it with `bridle show {session.id}`{_GREEDY if greedy else ''}"
    )


_GREEDY = (
    "\nbridle: the harness asked for temperature 0. Such replies can be imitated and not trained "
    "from rewards: `bridle run --sampling policy` pins the policy's own distribution"
)
