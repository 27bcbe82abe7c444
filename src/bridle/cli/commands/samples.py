"""``bridle samples``: make sessions' samples under a policy and keep them in the store."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import orjson
import typer

from bridle.cli.options import JsonOption, StoreOption
from bridle.cli.reading import one_session, reader
from bridle.cli.terminal import fail, out, print_json
from bridle.reconstruct.samples.builders import BUILDERS, add_up
from bridle.reconstruct.samples.policy import TrainablePolicy
from bridle.reconstruct.samples.sample_store import derive
from bridle.reconstruct.session import BrokenTree


def samples(
    store: StoreOption,
    session: Annotated[
        list[str] | None, typer.Argument(help="Sessions, by id or name; all when none is given.")
    ] = None,
    policy: Annotated[
        str, typer.Option(help='What is trained, as JSON or a file of it: {"parse_failed": false}')
    ] = "{}",
    builder: Annotated[str, typer.Option(help="tree, merged or per_call.")] = "tree",
    json: JsonOption = False,
) -> None:
    """Make samples and keep them, with their policy, in the table `samples`."""
    if builder not in BUILDERS:
        fail(f"there is no builder {builder!r}: {', '.join(BUILDERS)}", 2)
    chosen = _policy(policy)
    with reader(store) as source:
        if session:
            ids = [one_session(source, wanted).id for wanted in session]
        else:
            ids = [record.id for record in source.sessions()]
        tables, made, broken = [], 0, 0
        for session_id in ids:
            try:
                built = derive(source, session_id, chosen, builder)
            except BrokenTree:
                broken += 1
                continue
            made += len(built.samples)
            tables.append(built.conservation)
    total = add_up(tables)
    if json:
        print_json(
            {
                "sessions": len(tables),
                "broken": broken,
                "samples": made,
                "trained_tokens": total.trained,
                "policy": chosen.as_data(),
                "builder": builder,
            }
        )
        return
    out.print(f"{made} samples of {len(tables)} sessions, {total.trained} tokens trained")
    for reason, count in sorted((Counter(total.dropped) + Counter(total.masked)).items()):
        out.print(f"  not trained: {count} {reason}", highlight=False)
    if broken:
        out.print(f"  {broken} sessions contradict themselves: `bridle audit` says where")


def _policy(text: str) -> TrainablePolicy:
    try:
        plain = Path(text).read_bytes() if not text.lstrip().startswith("{") else text
        return TrainablePolicy.from_data(orjson.loads(plain))
    except (OSError, orjson.JSONDecodeError, TypeError, ValueError) as error:
        fail(f"--policy: {error}", 2)
