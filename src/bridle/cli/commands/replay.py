"""``bridle replay SESSION``: re-enter a recorded session at a turn."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path, PurePath
from typing import Annotated, Any, Final

import typer

from bridle.cli.commands.run import create, launch, seal
from bridle.cli.options import ProxyOption
from bridle.cli.terminal import err, fail
from bridle.harnesses.adapters import Configurable, configurable
from bridle.harnesses.client import Client, Origin, SessionRequest
from bridle.harnesses.install import NotLaunchable
from bridle.harnesses.started import (
    REMOVED,
    how_started,
    installed_version,
    workspace_commit,
)
from bridle.run.environment import admin_key_for

_NOTES: Final[Mapping[str, str]] = {
    "replay_noise": "noise",
    "replay_live": "live",
    "replay_diverged": "diverged",
}
"""The words for a turn, by the name of the note on its call."""


class OnDivergence(StrEnum):
    """The consequence of a request that differs from the recorded one."""

    STOP = "stop"
    LIVE = "live"
    FAIL = "fail"


def replay(
    session: Annotated[str, typer.Argument(help="Id of the recorded session.")],
    proxy: ProxyOption,
    branch: Annotated[
        str,
        typer.Option(
            "--from", help="Turn that is the first live one, as `bridle show` counts, or `last`."
        ),
    ] = "last",
    samples: Annotated[int, typer.Option(min=1, help="Number of siblings, one at a time.")] = 1,
    model: Annotated[
        str | None, typer.Option(help="Model that the live turns ask. Default: the recorded one.")
    ] = None,
    on_divergence: Annotated[
        OnDivergence,
        typer.Option(
            help="When a request differs from its record: end the sibling, ask the engine, or end "
            "the sibling and the command with exit status 1."
        ),
    ] = OnDivergence.STOP,
    noise: Annotated[
        list[str] | None,
        typer.Option(help="NAME=REGEX of text that may differ. Repeatable."),
    ] = None,
    key: Annotated[
        str | None, typer.Option(envvar="BRIDLE_ADMIN_KEY", help="Admin key of the proxy.")
    ] = None,
) -> None:
    """Start a recorded agent anew, and go on live at one of its turns.

    The earlier turns get the recorded replies, and no engine is asked for them. The command starts
    in the recorded folder, which should be as it was then.
    """
    key = admin_key_for(proxy, key)
    recorded, calls = asyncio.run(_recorded(proxy, key, session))
    argv, known = _command(recorded)
    branch_call = _branch(calls, branch)
    folder, places = _places(recorded)
    os.chdir(folder)
    for warning in _changes(recorded, argv[0]):
        err.print(f"bridle: {warning}", highlight=False, soft_wrap=True)
    stops = "live" if on_divergence is OnDivergence.LIVE else "stop"
    rules: dict[str, Any] = {"on_divergence": stops, "noise": dict(map(_rule, noise or ()))}
    request = SessionRequest(
        group_id=recorded["group_id"],
        harness=recorded["harness"],
        settings={"replay": rules if model is None else {**rules, "model": model}},
        start=replace(
            how_started(argv, str(folder), {**os.environ, **places}),
            harness_version=installed_version(argv[0]),
            workspace_commit=workspace_commit(str(folder)),
        ),
        origin=Origin(recorded["id"], branch_call["id"]),
    )
    code = 0
    for _ in range(samples):
        code, diverged = _sibling(proxy, key, request, argv, known, places, calls)
        if diverged and on_divergence is OnDivergence.FAIL:
            raise typer.Exit(1)
    raise typer.Exit(code)


def _sibling(
    proxy: str,
    key: str | None,
    request: SessionRequest,
    argv: Sequence[str],
    known: Configurable | None,
    places: Mapping[str, str],
    calls: Sequence[Mapping[str, Any]],
) -> tuple[int, bool]:
    """Run one sibling and print its turns. Return its exit code and whether it diverged."""
    opened = asyncio.run(create(proxy, key, request))
    try:
        code = launch(opened, argv, known, places=places)
    except NotLaunchable as error:
        asyncio.run(seal(proxy, key, opened, None, ""))
        fail(str(error))
    said = asyncio.run(seal(proxy, key, opened, code, "the command asked no model"))
    _, new = asyncio.run(_recorded(proxy, key, opened.id))
    turns = {call["id"]: call["turn"] for call in calls}
    for call in new:
        err.print(f"  {turn_line(call, turns)}", highlight=False, soft_wrap=True)
    err.print(said, highlight=False, soft_wrap=True)
    return code, any(note["name"] == "replay_diverged" for call in new for note in call["notes"])


def turn_line(call: Mapping[str, Any], turns: Mapping[str, int]) -> str:
    """Return the line of a call of a sibling: its turn, the recorded one, and how they compare.

    ``turns`` has the numbers of the recorded calls by their ids.
    """
    noted = {note["name"]: note["detail"] for note in call["notes"]}
    then = turns.get(call["replayed_call_id"] or noted.get("replay_live", ""))
    words = [_NOTES[name] for name in _NOTES if name in noted]
    if call["replayed_call_id"] is not None:
        words = ["replayed", *(words or ["same"])]
    details = [noted[name] for name in ("replay_noise", "replay_diverged") if name in noted]
    record = "" if then is None else f" (recorded turn {then})"
    return f"turn {call['turn']}{record}: {', '.join(words) or 'live'}" + "".join(
        f"; {detail}" for detail in details
    )


async def _recorded(
    proxy: str, key: str | None, session: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    async with Client(proxy, key) as client:
        return await client.session(session), await client.calls(session)


def _command(recorded: Mapping[str, Any]) -> tuple[list[str], Configurable | None]:
    """Return the recorded command, and the harness if it was configured for its session."""
    argv = recorded["argv"]
    if not argv:
        fail(
            f"session {recorded['id']} has no command: record the agent with `bridle run -- …`, "
            "then its session can be replayed"
        )
    if recorded["run_id"] is not None:
        fail(f"session {recorded['id']} belongs to a run, whose sandbox is not made again here")
    if any(REMOVED in word for word in argv):
        fail(f"the command of session {recorded['id']} held a secret, which is not recorded")
    if not Path(argv[0]).is_file():
        fail(f"the command of session {recorded['id']} is no longer at {argv[0]}")
    known = configurable(PurePath(argv[0]).name)
    return argv, known if known is not None and known.name == recorded["harness"] else None


def _branch(calls: Sequence[dict[str, Any]], wanted: str) -> dict[str, Any]:
    """Return the recorded call that is the first live one."""
    able = {call["turn"]: call for call in calls if call["status"] == "complete"}
    if not able:
        fail("the session has no complete call")
    if wanted == "last":
        return able[max(able)]
    if not wanted.isdigit() or int(wanted) not in able:
        fail(f"--from {wanted!r} is no complete turn; there are {', '.join(map(str, able))}", 2)
    return able[int(wanted)]


def _places(recorded: Mapping[str, Any]) -> tuple[Path, dict[str, str]]:
    """Return the recorded folder, and the variables of the recorded places.

    The command fails here if a place is gone, because the agent sees its name.
    """
    folder, home = Path(recorded["folder"] or os.getcwd()), recorded["home"]
    for place in (folder, *([Path(home)] if home else [])):
        if not place.is_dir():
            fail(f"the session ran in {place}, which is not there; make it again, or link it")
    variables = {"HOME": home, "TZ": recorded["tz"]}
    return folder, {name: value for name, value in variables.items() if value is not None}


def _changes(recorded: Mapping[str, Any], program: str) -> list[str]:
    """Return what is known to differ from the recorded start."""
    now = {
        "harness_version": ("the harness's version", installed_version(program)),
        "workspace_commit": ("the folder's Git commit", workspace_commit(os.getcwd())),
    }
    return [
        f"{what} was {recorded[name]}, now {value}"
        for name, (what, value) in now.items()
        if recorded[name] is not None and recorded[name] != value
    ]


def _rule(text: str) -> tuple[str, str]:
    name, equals, expression = text.partition("=")
    if not (name and equals and expression):
        fail(f"--noise {text!r} is not NAME=REGEX", 2)
    return name, expression
