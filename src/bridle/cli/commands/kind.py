"""``bridle kind``: set by hand what a call was for."""

from __future__ import annotations

import getpass
from typing import Annotated

import typer

from bridle.cli.options import JsonOption, StoreOption
from bridle.cli.reading import one_session, reader, require_turn
from bridle.cli.terminal import fail, out, print_json
from bridle.reconstruct.session import LoadedSession
from bridle.reconstruct.verdicts import store_judgement
from bridle.store.records import CallKind
from bridle.store.writing.writer import Writer

_AUTO = "auto"
_KINDS = (*(kind.value for kind in CallKind), _AUTO)


def kind(
    session: Annotated[str, typer.Argument(help="Id, name, beginning of an id, or `last`.")],
    turn: Annotated[int, typer.Argument(min=1, help="The call, as `show` numbers it.")],
    kind: Annotated[str, typer.Argument(help=f"{', '.join(_KINDS)}; auto undoes it.")],
    store: StoreOption,
    role: Annotated[str | None, typer.Option(help="Name of the sub-agent or side task.")] = None,
    line: Annotated[
        bool, typer.Option("--line", help="Also every call that continues this one.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Set what a call was for; show, train and export follow it."""
    if kind not in _KINDS:
        fail(f"{kind!r} is no kind: use {', '.join(_KINDS)}")
    with reader(store) as source:
        record = one_session(source, session)
        calls = source.calls(record.id)
        require_turn(record.id, turn, len(calls))
        chosen = {calls[turn - 1].id}
        for call in calls if line else ():
            if call.parent_call_id in chosen:
                chosen.add(call.id)
        chosen_kind = None if kind == _AUTO else CallKind(kind)
        with Writer(store) as writer:
            for call in calls:
                if call.id in chosen:
                    writer.set_kind_sync(call.id, chosen_kind, role, by=getpass.getuser())
        loaded = LoadedSession.load(source, record.id)
        store_judgement(loaded)
    if json:
        kinds = {call.id: call.kind.value for call in loaded.calls}
        print_json({"session": record.id, "kinds": kinds})
        return
    for number, call in enumerate(calls, start=1):
        verdict = loaded.verdicts[call.id]
        mark = "*" if call.id in chosen else " "
        out.print(f"{mark} {number:>3}  {verdict.kind:<10} {verdict.evidence}")
