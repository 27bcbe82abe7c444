"""``bridle why SESSION``: the turn that lost a session."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from bridle.cli.commands.replay import recorded, siblings_of
from bridle.cli.options import CheckOption, JsonOption, KeyOption, ProxyOption, ResetOption
from bridle.cli.serving import leave_on_sigterm
from bridle.cli.terminal import err, fail, out, print_json
from bridle.diagnosis.why import Explanation, Tried, Value
from bridle.harnesses.client import Client
from bridle.run.environment import admin_key_for
from bridle.run.siblings import Recording
from bridle.run.why import explained, finding, record, turns_of


def why(
    session: Annotated[str, typer.Argument(help="Id of the recorded session.")],
    proxy: ProxyOption,
    check: CheckOption = None,
    reset: ResetOption = False,
    budget: Annotated[int, typer.Option(min=1, help="Maximum number of re-entries in all.")] = 40,
    per_turn: Annotated[
        int, typer.Option(min=1, help="Maximum number of re-entries after one turn.")
    ] = 8,
    success: Annotated[
        float, typer.Option(help="The lowest reward with which a session has succeeded.")
    ] = 1.0,
    parallel: Annotated[int | None, typer.Option(min=1, help="Siblings at a time.")] = None,
    key: KeyOption = None,
    json: JsonOption = False,
) -> None:
    """Find the turn that lost a session, by re-entering it.

    It prints the chance of success after each chosen turn, and records the turn that lost
    most as a finding. A session without a reward counts as failed.
    """
    key = admin_key_for(proxy, key)
    recording = asyncio.run(recorded(proxy, key, session))
    if recording.run is None and check is None:
        fail("what is success? name a command with --check, such as --check 'pytest -q'", 2)
    reward = recording.reward
    leave_on_sigterm()
    with siblings_of(
        *(proxy, key, recording), parallel=parallel, check=check, reset=reset
    ) as siblings:
        found = explained(
            recording,
            siblings,
            succeeded=reward is not None and reward >= success,
            success=success,
            per_turn=per_turn,
            budget=budget,
            on_batch=_print_batch,
        )
    asyncio.run(_record(proxy, key, recording, found))
    if json:
        about = finding(recording, found)
        print_json(None if about is None else {"turn": about.turn, **about.detail})
        return
    for line in lines(found, turns_of(recording)):
        out.print(line)


def lines(found: Explanation, turns: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the values as lines, and one about the turn that lost the session."""
    shown = []
    for after, value in sorted(found.values.items()):
        place = f"after turn {turns[after - 1]['turn']}" if after else "at the beginning"
        shown.append(f"{place}: {_shown(value)}")
    if found.lost is None:
        return [*shown, f"no turn certainly lost it ({found.spent} re-entries)"]
    low, high = found.lost.interval
    turn = turns[found.lost.turn - 1]["turn"]
    return [
        *shown,
        f"turn {turn} lost it: the chance of success fell by {found.lost.loss:.2f} "
        f"({low:.2f} to {high:.2f}; {found.spent} re-entries)",
    ]


def _shown(value: Value) -> str:
    if value.known:
        return "succeeded" if value.successes else "failed"
    low, high = value.interval
    return f"{value.successes} of {value.samples}, {value.chance:.2f} ({low:.2f} to {high:.2f})"


def _print_batch(after: int, tried: Sequence[Tried]) -> None:
    rewards = ", ".join("none" if one.reward is None else f"{one.reward:g}" for one in tried)
    err.print(f"re-entered after turn {after}: rewards {rewards}")


async def _record(proxy: str, key: str | None, recording: Recording, found: Explanation) -> None:
    async with Client(proxy, key) as client:
        await record(client, recording, found)
