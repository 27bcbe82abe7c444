"""``bridle verify``: compare recorded logprobs with those of an engine."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from bridle.cli.options import JsonOption, StoreOption, base_urls
from bridle.cli.reading import one_session, reader
from bridle.cli.terminal import out, print_json, print_table
from bridle.engine.contract.client import EngineClient
from bridle.keys import UPSTREAM_KEY_VARIABLE
from bridle.reconstruct.session import LoadedSession
from bridle.run.environment import key_in
from bridle.run.verification import TOLERANCE, VerifiedSession
from bridle.run.verification import verify as compare
from bridle.store.reading.queries import Reader
from bridle.store.records import SessionRecord


def verify(
    about: Annotated[
        str, typer.Argument(metavar="SESSION|RUN", help="`last`: the newest session.")
    ],
    store: StoreOption,
    engine: Annotated[str, typer.Option(callback=base_urls, help="The engine's base URL.")],
    tolerance: Annotated[
        float,
        typer.Option(min=0.0, help="Largest mean difference, in nats a token; bfloat16 needs 0.1."),
    ] = TOLERANCE,
    limit: Annotated[
        int, typer.Option(min=1, help="Maximum number of a run's sessions, the newest first.")
    ] = 16,
    json: JsonOption = False,
) -> None:
    """Re-feed recorded ids to an engine and compare logprobs and texts.

    A control changes an id and must change the logprobs. Exits with 1 if a session differs or
    nothing could be compared.
    """
    with (
        reader(store) as source,
        EngineClient(engine, api_key=key_in(UPSTREAM_KEY_VARIABLE)) as client,
    ):
        chosen = _sessions(source, about, limit)
        found = list(compare(source, client, LoadedSession.stream(source, chosen)))
    verdicts = [one.verdict(tolerance) for one in found]
    if json:
        print_json(
            [
                asdict(one) | {"verdict": verdict}
                for one, verdict in zip(found, verdicts, strict=True)
            ]
        )
    else:
        _print(found, verdicts)
    if set(verdicts) != {"ok"}:
        raise typer.Exit(1)


def _sessions(source: Reader, about: str, limit: int) -> list[SessionRecord]:
    if about in {run.id for run in source.runs()}:
        return list(source.sessions(run=about, limit=limit, newest_first=True))
    return [one_session(source, about)]


def _print(found: list[VerifiedSession], verdicts: list[str]) -> None:
    rows = [
        [
            one.session_id,
            ", ".join(map(str, one.versions)) or "–",
            str(one.tokens),
            f"{one.gap:.2g}",
            f"{one.largest:.2g}",
            "–" if one.control is None else f"{one.control:.2g}",
            f"{one.texts - len(one.other_texts)} of {one.texts}" if one.texts else "–",
            verdict,
        ]
        for one, verdict in zip(found, verdicts, strict=True)
    ]
    names = ("session", "version", "tokens", "mean gap", "largest", "control", "texts", "verdict")
    print_table(names, rows, shrinks="session")
    for one in found:
        for token, recorded, engines in one.other_texts[:3]:
            out.print(f"{one.session_id}: id {token} was {recorded!r} and is {engines!r}")
