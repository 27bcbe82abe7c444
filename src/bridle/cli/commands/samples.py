"""``bridle samples``: make the samples of sessions and keep them in the store."""

from __future__ import annotations

from typing import Annotated

import typer

from bridle.cli.options import JsonOption, StoreOption
from bridle.cli.reading import one_session, reader
from bridle.cli.rules import RulesOption, sample_rules
from bridle.cli.terminal import counted, fail, out, print_json
from bridle.reconstruct.samples.builders import BUILDERS
from bridle.reconstruct.samples.sample import Conservation
from bridle.reconstruct.samples.sample_store import derive
from bridle.reconstruct.session import LoadedSession
from bridle.reconstruct.tree import BrokenTree


def samples(
    store: StoreOption,
    session: Annotated[
        list[str] | None, typer.Argument(help="Sessions, by id or name; all when none is given.")
    ] = None,
    rules: RulesOption = "{}",
    builder: Annotated[str, typer.Option(help="tree, merged or per_call.")] = "tree",
    json: JsonOption = False,
) -> None:
    """Make samples and keep them, with their rules, in the table `samples`."""
    if builder not in BUILDERS:
        fail(f"there is no builder {builder!r}: {', '.join(BUILDERS)}", 2)
    chosen = sample_rules(rules)
    with reader(store) as source:
        named = [one_session(source, wanted) for wanted in session or ()]
        tables, made, broken = [], 0, 0
        for loaded in LoadedSession.stream(source, named or source.sessions()):
            try:
                built = derive(loaded, chosen, builder)
            except BrokenTree:
                broken += 1
                continue
            made += len(built.samples)
            tables.append(built.conservation)
    total = sum(tables, Conservation(0, 0))
    if json:
        print_json(
            {
                "sessions": len(tables),
                "broken": broken,
                "samples": made,
                "trainable_tokens": total.trained,
                "rules": chosen.as_data(),
                "builder": builder,
            }
        )
        return
    sessions = counted(len(tables), "session")
    out.print(f"{counted(made, 'sample')} of {sessions}, {total.trained} tokens trainable")
    for reason, count in sorted(total.untrained.items()):
        out.print(f"  not trainable: {count} {reason}", highlight=False)
    if broken:
        out.print(f"  {broken} sessions contradict themselves: see `bridle audit`")
