"""``bridle replay SESSION``: re-enter a recorded session at a turn."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Generator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from bridle.cli.commands.run import create, launch, seal
from bridle.cli.options import CheckOption, ProxyOption, ResetOption, StoreOption, model_path
from bridle.cli.serving import leave_on_sigterm
from bridle.cli.terminal import err, fail, out
from bridle.harnesses.client import Client, Origin
from bridle.harnesses.install import NotLaunchable
from bridle.run.environment import admin_key_for, is_base_url
from bridle.run.siblings import Entry, Recording, Sibling, Siblings
from bridle.run.siblings.commands import CommandSiblings, RecordedCommand
from bridle.run.siblings.copies import why_no_copies
from bridle.run.siblings.jobs import JobSiblings
from bridle.run.siblings.served import proxy_before

_WORDS: Final = ("noise", "handle", "edited", "live", "diverged")
"""The words for a turn, after `replay_` in the names of the notes on its call."""
_PARALLEL: Final = 4
"""Siblings of a command at a time."""


def replay(
    session: Annotated[str, typer.Argument(help="Id of the recorded session.")],
    proxy: ProxyOption,
    store: StoreOption,
    branch: Annotated[
        str,
        typer.Option(
            "--from", help="Turn that is the first live one, as `bridle show` counts, or `last`."
        ),
    ] = "last",
    samples: Annotated[int, typer.Option(min=1, help="Number of siblings.")] = 1,
    parallel: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Siblings at a time. Default: 4 in copies of the folder, or as many as the run of "
            "the session had. With 1 a command has the terminal and the folder itself.",
        ),
    ] = None,
    check: CheckOption = None,
    reset: ResetOption = False,
    model: Annotated[
        str | None, typer.Option(help="Model that the live turns ask. Default: the recorded one.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            "--policy",
            metavar="URL|MODEL",
            help="Another engine for the live turns: its base URL, or a model or checkpoint that "
            "gets one. A proxy of its own, on the same store, serves the siblings.",
        ),
    ] = None,
    on_divergence: Annotated[
        Literal["stop", "live", "fail"],
        typer.Option(
            help="When a request differs from its record: end the sibling, ask the engine, or end "
            "the sibling and the command with exit status 1."
        ),
    ] = "stop",
    pace: Annotated[
        Literal["instant", "recorded"],
        typer.Option(
            help="Send recorded replies at once, or as long after the first request as recorded, "
            "so that work in the background ends at the same turn."
        ),
    ] = "instant",
    edit: Annotated[
        Path | None,
        typer.Option(
            help="JSON file of text that the live turns see in place of recorded text: `system`, "
            "and `tool_results` by the ids of their calls; or of the `reply` to which the agent "
            "goes on; and of `noise`, patterns by name of text that may differ."
        ),
    ] = None,
) -> None:
    """Start a recorded agent anew, and go on live at one of its turns.

    The earlier turns get the recorded replies, and no engine is asked for them. A session of
    `bridle run` starts its command again, several siblings in copies of the recorded folder. A
    session of a run gets its sandbox, agent and verifier again.
    """
    leave_on_sigterm()
    with ExitStack() as opened:
        key = admin_key_for(proxy)
        if engine is not None:
            proxy, key = opened.enter_context(proxy_before(store, _served_by(engine)))
        recording = asyncio.run(recorded(proxy, key, session))
        branch_call = _branch(recording, branch)
        stops = "live" if on_divergence == "live" else "stop"
        rules = {"on_divergence": stops, "pace": pace, **_edits(edit)}
        entry = Entry(
            Origin(recording.id, branch_call["id"]),
            rules if model is None else {**rules, "model": model},
            branch_call["id"],
        )
        apart = samples > 1 or check is not None or reset
        code = 0
        turns = {call["id"]: call["turn"] for call in recording.calls}
        siblings = opened.enter_context(
            siblings_of(
                *(proxy, key, recording), parallel=parallel, check=check, reset=reset, apart=apart
            )
        )
        for sibling in opened.enter_context(closing(siblings.run(entry, samples))):
            diverged = asyncio.run(_show(proxy, key, sibling, turns))
            if diverged and on_divergence == "fail":
                raise typer.Exit(1)
            code = 1 if sibling.exit_code is None else sibling.exit_code
    raise typer.Exit(code)


def siblings_of(
    proxy: str,
    key: str | None,
    recording: Recording,
    *,
    parallel: int | None = None,
    check: str | None = None,
    reset: bool = False,
    apart: bool = True,
) -> Siblings:
    """Return the runner of a recorded session's siblings.

    ``apart`` is whether those of a command work in copies of its folder. Raise
    :class:`bridle.run.siblings.NotReentrant`.
    """
    if recording.run is not None:
        return JobSiblings(proxy, key, recording, parallel)
    command = RecordedCommand.of(recording)
    for warning in command.changes():
        err.print(f"bridle: {warning}")
    why = why_no_copies(command.folder) if apart else None
    if why is not None and (check is not None or reset):
        fail(f"siblings cannot have copies of their folder, which --check and --reset need: {why}")
    if not apart or why is not None or (parallel == 1 and check is None and not reset):
        if why is not None:
            err.print(f"bridle: one sibling at a time, in the folder itself: {why}")
        return _InTerminal(proxy, key, command)
    commit = recording.session["workspace_commit"] if reset else None
    if reset and commit is None:
        fail(f"session {recording.id} has no recorded commit to --reset its folder to")
    return CommandSiblings(
        proxy, key, command, parallel=parallel or _PARALLEL, check=check, commit=commit
    )


@dataclass(frozen=True, slots=True)
class _InTerminal(Siblings):
    """Starts a recorded command in its own folder, with this terminal, one sibling at a time."""

    proxy: str
    key: str | None
    command: RecordedCommand

    def run(self, entry: Entry, count: int) -> Generator[Sibling]:
        os.chdir(self.command.folder)
        for _ in range(count):
            yield self._one(entry)

    def _one(self, entry: Entry) -> Sibling:
        command = self.command
        opened = asyncio.run(create(self.proxy, self.key, command.request(entry)))
        try:
            code = launch(opened, command.argv, command.known, places=command.places)
        except NotLaunchable as error:
            asyncio.run(seal(self.proxy, self.key, opened, None, ""))
            fail(str(error))
        said = asyncio.run(seal(self.proxy, self.key, opened, code, "the command asked no model"))
        return Sibling(opened.id, None, code, stderr=f"{said}\n")


async def _show(proxy: str, key: str | None, sibling: Sibling, turns: Mapping[str, int]) -> bool:
    """Print a sibling's output and turns. Return whether it diverged.

    ``turns`` has the numbers of the recorded calls by their ids.
    """
    sys.stdout.write(sibling.stdout)
    sys.stdout.flush()
    err.print(f"sibling {sibling.session_id or 'without a session'}:")
    if sibling.session_id is None:
        err.print(f"  {sibling.error}")
        return False
    async with Client(proxy, key) as client:
        calls = await client.calls(sibling.session_id)
    for call in calls:
        err.print(f"  {turn_line(call, turns)}")
    if sibling.reward is not None:
        out.print(f"{sibling.session_id}: reward {sibling.reward:g}")
    if text := (sibling.error or sibling.stderr).strip():
        err.print(text)
    return any(note["name"] == "replay_diverged" for call in calls for note in call["notes"])


def turn_line(call: Mapping[str, Any], turns: Mapping[str, int]) -> str:
    """Return the line of a call of a sibling: its turn, the recorded one, and how they compare.

    ``turns`` has the numbers of the recorded calls by their ids.
    """
    noted = {note["name"]: note["detail"] for note in call["notes"]}
    then = turns.get(call["replayed_call_id"] or noted.get("replay_live", ""))
    words = [word for word in _WORDS if f"replay_{word}" in noted]
    details = [noted[f"replay_{word}"] for word in words if word != "live"]
    if call["replayed_call_id"] is not None:
        words = ["replayed", *(words or ["same"])]
    record = "" if then is None else f" (recorded turn {then})"
    return f"turn {call['turn']}{record}: {', '.join(words) or 'live'}" + "".join(
        f"; {detail}" for detail in details
    )


async def recorded(proxy: str, key: str | None, session: str) -> Recording:
    async with Client(proxy, key) as client:
        return await Recording.load(client, session)


def _branch(recording: Recording, wanted: str) -> Mapping[str, Any]:
    """Return the recorded call that is the first live one."""
    able = {call["turn"]: call for call in recording.complete()}
    if not able:
        fail("the session has no complete call")
    if wanted == "last":
        return able[max(able)]
    if not wanted.isdigit() or int(wanted) not in able:
        fail(f"--from {wanted!r} is no complete turn; there are {', '.join(map(str, able))}", 2)
    return able[int(wanted)]


def _served_by(engine: str) -> str | Path:
    """Return an engine's base URL, or the directory of the model to serve."""
    return engine if is_base_url(engine) else model_path(engine)


def _edits(file: Path | None) -> dict[str, Any]:
    """Return the settings of a replay in a file: its ``noise``, and the rest as ``edit``."""
    if file is None:
        return {}
    try:
        edits = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        fail(f"--edit {file} is no readable JSON file: {error}", 2)
    if not isinstance(edits, dict):
        fail(f"--edit {file} is no JSON object of 'system', 'tool_results', 'reply' or 'noise'", 2)
    noise = edits.pop("noise", {})
    return {"noise": noise, "edit": edits} if edits else {"noise": noise}
