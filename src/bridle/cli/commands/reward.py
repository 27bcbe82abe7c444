"""``bridle reward``: score a session after the fact."""

from __future__ import annotations

import math
import time
from typing import Annotated

import typer

from bridle.cli.options import StoreOption
from bridle.cli.reading import one_session, reader, require_turn
from bridle.cli.terminal import out
from bridle.errors import UsageError
from bridle.store.declaration import SHORT_TEXT
from bridle.store.reading.queries import Reader
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
    if role is not None and turn is not None:
        raise UsageError("a reward has one place: give --turn or --role")
    with reader(store) as source:
        record = one_session(source, session)
        new = operator_reward(source, record.id, name, value, turn=turn, role=role)
    with Writer(store) as writer:
        writer.add_sync(new)
    place = f" (turn {turn})" if turn else f" (role {role})" if role else ""
    out.print(f"{record.id}: {name} = {value:g}{place}")


def operator_reward(
    source: Reader,
    session: str,
    name: str,
    value: float,
    *,
    turn: int | None = None,
    role: str | None = None,
    note: str | None = None,
) -> Reward:
    """Return a person's reward for a session, or for one turn or role of it.

    Raise :class:`bridle.errors.UsageError` for a value, name or turn that there cannot be.
    """
    if not math.isfinite(value):
        raise UsageError(f"a reward is a finite number, not {value}")
    if not 1 <= len(name) <= SHORT_TEXT:
        raise UsageError(f"a reward's name has 1 to {SHORT_TEXT} characters, not {len(name)}")
    call_id = None
    if turn is not None:
        calls = source.call_ids(session)
        require_turn(session, turn, len(calls))
        call_id = calls[turn - 1]
    return Reward(
        session_id=session,
        name=name,
        value=value,
        created_at=time.time(),
        call_id=call_id,
        turn=turn,
        source=RewardSource.OPERATOR,
        role=role,
        detail={"note": note} if note else {},
    )
