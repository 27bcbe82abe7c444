"""``bridle seal``: end a session that was recorded through a base URL alone."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import typer

from bridle.cli.options import KeyOption, ProxyOption, StoreOption
from bridle.cli.reading import one_session, reader
from bridle.cli.terminal import fail, out
from bridle.harnesses.client import Client, ControlError, ProxyUnreachable
from bridle.run.environment import admin_key_for
from bridle.store.writing.batch import Patch
from bridle.store.writing.writer import Writer

LONGEST_OUTCOME = 32


def seal(
    session: Annotated[str, typer.Argument(help="Id, name, beginning of an id, or `last`.")],
    store: StoreOption,
    proxy: ProxyOption,
    outcome: Annotated[str, typer.Option(help="How the session ended.")] = "completed",
    key: KeyOption = None,
) -> None:
    """End a session: it takes no more calls, and reaches the feed.

    The proxy that records the session seals it. If there is no such proxy, the store is changed
    directly.
    """
    if not 1 <= len(outcome) <= LONGEST_OUTCOME:
        fail(f"an outcome has 1 to {LONGEST_OUTCOME} characters, not {len(outcome)}", 2)
    with reader(store) as source:
        record = one_session(source, session)
        if record.sealed_at is not None:
            out.print(f"{record.id} is sealed already: {record.outcome}")
            return
    if not asyncio.run(_sealed_by(proxy, admin_key_for(proxy, key), record.id, outcome)):
        with Writer(store) as writer:
            fields = {"sealed_at": time.time(), "outcome": outcome}
            writer.add_sync(Patch("sessions", record.id, fields, once="sealed_at"))
    out.print(f"{record.id} is sealed: {outcome}")


async def _sealed_by(proxy: str, key: str | None, session_id: str, outcome: str) -> bool:
    """Return whether a proxy has sealed the session.

    The answer is false if no proxy answers, or if it does not have the session.

    Raise :class:`ControlError` if the proxy refuses.
    """
    async with Client(proxy, key) as client:
        try:
            await client.seal(session_id, outcome)
        except ProxyUnreachable:
            return False
        except ControlError as error:
            if error.status != 404:
                raise
            return False
    return True
