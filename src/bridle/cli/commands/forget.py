"""``bridle forget``: delete sessions with all that only they use."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from bridle.cli.options import JsonOption, StoreOption
from bridle.cli.reading import one_session, reader
from bridle.cli.terminal import counted, fail, out, print_json
from bridle.store.operations.retention import forget as forget_sessions
from bridle.store.operations.retention import older_than as find_older


def forget(
    store: StoreOption,
    session: Annotated[list[str] | None, typer.Argument(help="Sessions, by id or name.")] = None,
    older_than: Annotated[
        float | None,
        typer.Option(min=0, help="All sessions that started more than this many days ago."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    json: JsonOption = False,
) -> None:
    """Delete recorded sessions, with all that no other session uses."""
    if not session and older_than is None:
        fail("name a session, or give --older-than DAYS")
    with reader(store) as source:
        chosen = [one_session(source, wanted).id for wanted in session or ()]
        if older_than is not None:
            with source.engine.connect() as connection:
                chosen += find_older(connection, time.time() - older_than * 86_400)
        chosen = list(dict.fromkeys(chosen))
        if chosen and not yes:
            typer.confirm(
                f"Delete {counted(len(chosen), 'session')} for good?", abort=True, err=True
            )
        gone = forget_sessions(source.engine, chosen)
    if json:
        print_json({"sessions": gone.sessions, "calls": gone.calls})
    else:
        out.print(f"Forgot {counted(gone.sessions, 'session')}, {counted(gone.calls, 'call')}.")
