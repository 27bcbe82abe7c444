"""``bridle top``: show what is being recorded, once a second."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bridle.cli.options import JsonOption, KeyOption, ProxyOption, RunOption, StoreOption
from bridle.cli.reading import reader, require_run
from bridle.cli.terminal import counted, out, print_json
from bridle.diagnosis.pages import SessionLine, placed_sessions, session_lines
from bridle.diagnosis.transcript import lasted
from bridle.harnesses.client import Client, ControlError, ProxyUnreachable
from bridle.reconstruct.rewards import CountedRewards
from bridle.run.environment import admin_key_for
from bridle.store.reading.activity import Activity, activity
from bridle.store.reading.queries import Reader
from bridle.store.reading.session_filter import OPEN, SessionFilter
from bridle.viewer.training import groups_of

_WINDOW_S: Final = 10.0
"""Seconds before now; rates are over the calls that ended in them."""
_SHOWN: Final = 8
"""The number of sessions that are listed."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The state of the store and the engines at one moment."""

    activity: Activity
    engines: list[dict[str, Any]]
    proxy: str
    """The reason why no engines are listed; empty if they are."""
    sessions: list[SessionLine]
    groups: Counter[str]
    """The number of groups of the run, or of all sessions, by outcome."""


def top(
    store: StoreOption,
    proxy: ProxyOption,
    run: RunOption = None,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    key: KeyOption = None,
    json: JsonOption = False,
) -> None:
    """Show live what is recorded. Ctrl-C ends.

    It shows calls per second, engines, sessions and groups.
    """
    key = admin_key_for(proxy, key)
    with reader(store) as source:
        require_run(source, run)
        frame = _look(source, run, proxy, key)
        if json:
            print_json(_as_data(frame))
        elif once or not out.is_terminal:
            out.print(_drawn(frame))
        else:
            _follow(source, run, proxy, key, every, frame)


def _follow(
    source: Reader, run: str | None, proxy: str, key: str | None, every: float, frame: Frame
) -> None:
    with Live(_drawn(frame), console=out, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(every)
                live.update(_drawn(_look(source, run, proxy, key)), refresh=True)
        except KeyboardInterrupt:
            return


def _look(source: Reader, run: str | None, proxy: str, key: str | None) -> Frame:
    wanted, number = SessionFilter(run=run), CountedRewards(source).number
    engines, problem = asyncio.run(_engines(proxy, key))
    groups = groups_of(placed_sessions(source, wanted, number))
    return Frame(
        activity(source, time.time() - _WINDOW_S),
        engines,
        problem,
        session_lines(source, wanted, number=number, limit=_SHOWN),
        Counter(group.outcome.value for group in groups),
    )


async def _engines(proxy: str, key: str | None) -> tuple[list[dict[str, Any]], str]:
    async with Client(proxy, key, timeout_s=2.0) as client:
        try:
            return await client.engines(), ""
        except (ProxyUnreachable, ControlError) as error:
            return [], str(error)


def _drawn(frame: Frame) -> RenderableType:
    now = frame.activity
    rates = (
        f"{now.calls / _WINDOW_S:.1f} calls/s · {now.sampled / _WINDOW_S:.0f} tokens/s · "
        f"slowest {lasted(now.slowest_s)} · {now.running} running · "
        f"{counted(now.open_sessions, 'open session')}"
    )
    parts: list[RenderableType] = [Text(rates, style="bold")]
    if now.failed:
        parts.append(Text(f"{counted(now.failed, 'call')} of {now.calls} failed", style="red"))
    parts += [_engine(engine) for engine in frame.engines] or [Text(frame.proxy, style="dim")]
    if frame.groups:
        each = ", ".join(f"{number} {name}" for name, number in frame.groups.most_common())
        parts.append(Text(f"groups: {each}"))
    return Group(*parts, Text(), _sessions(frame.sessions))


def _engine(engine: dict[str, Any]) -> Text:
    state = "ok" if engine["usable"] else engine["circuit"]
    line = f"engine {engine['name']}: {state}, version {engine['policy_version']}, "
    style = "green" if engine["usable"] else "red"
    return Text(f"{line}{counted(engine['running'], 'call')} running", style=style)


def _sessions(lines: list[SessionLine]) -> Table:
    table = Table(box=None, pad_edge=False, expand=True)
    for name in ("session", "outcome", "calls", "took", "task"):
        right = name in ("calls", "took")
        ratio = 1 if name == "task" else None
        table.add_column(
            name,
            justify="right" if right else "left",
            no_wrap=True,
            ratio=ratio,
            overflow="ellipsis",
        )
    for line in lines:
        outcome = "running" if line.running else line.record.outcome or OPEN
        table.add_row(
            Text(line.record.name or line.record.id),
            Text(outcome, style="cyan" if line.running else ""),
            Text(str(line.calls)),
            Text(lasted(line.seconds)),
            Text(line.title or line.record.task_id or ""),
        )
    return table


def _as_data(frame: Frame) -> dict[str, Any]:
    return {
        "window_s": _WINDOW_S,
        **asdict(frame.activity),
        "engines": frame.engines,
        "groups": dict(frame.groups),
        "sessions": [line.record.id for line in frame.sessions],
    }
