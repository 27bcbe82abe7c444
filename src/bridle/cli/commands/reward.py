"""``bridle reward``: score a session after the fact."""

from __future__ import annotations

import math
import time
from typing import Annotated

import typer

from bridle.cli.options import StoreOption
from bridle.cli.reading import one_session, reader, require_turn
from bridle.cli.terminal import fail, out
from bridle.store.declaration import SHORT_TEXT
from bridle.store.reward import Reward, RewardSource
from bridle.store.writing.writer import Writer

CONTEXT = {"ignore_unknown_options": True}
"""Settings with which a negative score, which looks like an option, is read as an argument."""


def reward(
    session: Annotated[str, typer.Argument(help="Id, name, beginning of an id, or `last`.")],
    value: Annotated[float, typer.Argument(help="The score.")],
    store: StoreOption,
    name: Annotated[str, typer.Option(help="Name of the reward.")] = "reward",
    turn: Annotated[int | None, typer.Option(help="Only this turn, as `show` numbers it.")] = None,
    role: Annotated[str | None, typer.Option(help="Only the calls of this role.")] = None,
) -> None:
    """Add a named reward to a session, or to one turn or role of it."""
    if not math.isfinite(value):
        fail(f"a reward is a finite number, not {value}", 2)
    if not 1 <= len(name) <= SHORT_TEXT:
        fail(f"a reward's name has 1 to {SHORT_TEXT} characters, not {len(name)}", 2)
    if role is not None and turn is not None:
        fail("a reward has one place: give --turn or --role", 2)
    with reader(store) as source:
        record = one_session(source, session)
        call_id = None
        if turn is not None:
            calls = source.call_ids(record.id)
            require_turn(record, turn, len(calls))
            call_id = calls[turn - 1]
    with Writer(store) as writer:
        writer.add_sync(
            Reward(
                session_id=record.id,
                name=name,
                value=value,
                created_at=time.time(),
                call_id=call_id,
                turn=turn,
                source=RewardSource.OPERATOR,
                role=role,
            )
        )
    place = f" (turn {turn})" if turn else f" (role {role})" if role else ""
    out.print(f"{record.id}: {name} = {value:g}{place}")
