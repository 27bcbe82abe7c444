"""Samples in the store, with the builder and the rules that made them.

A stored sample is a list of segments of spans: it repeats no token, and reading it gives the same
arrays, bit for bit. A session has one set of samples per builder, the latest. When a call's kind
changes, :func:`derive_again` makes the samples again under the rules that are stored with them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, delete, insert, select

from bridle.reconstruct.samples.builders import BUILDER_VERSION, Built, assemble, build
from bridle.reconstruct.samples.rules import DEFAULT_RULES, SampleRules
from bridle.reconstruct.samples.sample import Sample
from bridle.reconstruct.session import LoadedSession
from bridle.reconstruct.tree import Branch, BrokenTree, SessionTree, SpanPiece
from bridle.reconstruct.verdicts import store_verdicts
from bridle.store.records import new_id
from bridle.store.schema.accounts import TRAINABLE
from bridle.store.schema.database import transaction
from bridle.store.schema.tables import samples, token_fates
from bridle.store.writing.fates import fate_rows


def derive(
    session: LoadedSession, rules: SampleRules = DEFAULT_RULES, builder: str = "tree"
) -> Built:
    """Make a session's samples and store them in place of those that the builder made before.

    Raise :class:`bridle.reconstruct.tree.BrokenTree`, and ``KeyError`` for an unknown builder.
    """
    built = build(session, rules, builder)
    now = time.time()
    rows = [
        {
            "id": new_id("sample"),
            "session_id": session.id,
            "builder": builder,
            "builder_version": BUILDER_VERSION,
            "rules": rules.as_data(),
            "leaf_call_id": sample.leaf_call_id,
            "segments": [[piece.span.id, piece.take, piece.trains] for piece in branch],
            "weight": sample.weight,
            "created_at": now,
        }
        for sample, branch in zip(built.samples, built.branches, strict=True)
    ]
    with transaction(session.reader.engine) as connection:
        connection.execute(
            delete(samples).where(samples.c.session_id == session.id, samples.c.builder == builder)
        )
        if rows:
            connection.execute(insert(samples), rows)
        _store_account(connection, session, built, builder)
    return built


def _store_account(
    connection: Connection, session: LoadedSession, built: Built, builder: str
) -> None:
    """Store the account of the sampled tokens and the verdict on each call.

    SQL can then read both.
    """
    place = {"session_id": session.id, "builder": builder, "run_id": ""}
    own = (token_fates.c[name] == value for name, value in place.items())
    connection.execute(delete(token_fates).where(*own))
    fates = {TRAINABLE: 0} | built.conservation.by_fate(TRAINABLE)
    connection.execute(insert(token_fates), fate_rows(fates, **place))
    store_verdicts(connection, session)


def derive_again(session: LoadedSession) -> int:
    """Make a session's stored samples again, each set under its own rules. Return their number."""
    sets = {row["builder"]: row["rules"] for row in _rows(session)}
    return sum(
        len(derive(session, SampleRules.from_data(rules), builder).samples)
        for builder, rules in sets.items()
    )


def stored_samples(
    session: LoadedSession, builder: str = "tree"
) -> tuple[SampleRules | None, list[Sample]]:
    """Return the session's stored samples and their rules.

    If there are none, return ``None`` and no samples. Raise
    :class:`bridle.reconstruct.tree.BrokenTree` if a span that they need is missing.
    """
    rows = [row for row in _rows(session) if row["builder"] == builder]
    if not rows:
        return None, []
    found = [
        assemble(session.tree, _branch(session.tree, row["segments"]), row["weight"])
        for row in rows
    ]
    return SampleRules.from_data(rows[0]["rules"]), found


def _branch(tree: SessionTree, segments: Sequence[Any]) -> Branch:
    pieces: list[SpanPiece] = []
    for span_id, take, trains in segments:
        row = tree.rows.get(span_id)
        if row is None:
            raise BrokenTree(f"a stored sample needs span {span_id}, which is missing")
        pieces.append(SpanPiece(row, take, tuple((start, end) for start, end in trains)))
    return tuple(pieces)


def _rows(session: LoadedSession) -> list[Any]:
    query = select(samples).where(samples.c.session_id == session.id)
    with session.reader.engine.connect() as connection:
        rows = connection.execute(query).mappings().all()
    order = {call_id: number for number, call_id in enumerate(session.by_id)}
    return sorted(rows, key=lambda row: (order.get(row["leaf_call_id"], -1), _choice(row)))


def _choice(row: Any) -> int:
    """Return the choice that ends the sample."""
    return int(row["segments"][-1][0].rsplit(".s", 1)[1])
