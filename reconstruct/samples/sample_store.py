"""Samples kept in the store, with the builder and the policy that made them.

A kept sample is a list of segments of spans: it repeats no token, and reading it gives the same
arrays, bit for bit. Of each builder a session has one set, the latest. When what the samples hang
on changes (a person says what a call was for), :func:`derive_again` makes them again under the
policy that is stored with them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, insert, select

from bridle.reconstruct.samples.builders import BUILDER_VERSION, Built, Segment, assemble, build
from bridle.reconstruct.samples.policy import DEFAULT_POLICY, TrainablePolicy
from bridle.reconstruct.samples.sample import Sample
from bridle.reconstruct.session import BrokenTree, Piece, SessionTree
from bridle.store.reading.queries import Reader
from bridle.store.records import new_id
from bridle.store.schema.database import transaction
from bridle.store.schema.tables import samples


def derive(
    reader: Reader,
    session_id: str,
    policy: TrainablePolicy = DEFAULT_POLICY,
    builder: str = "tree",
) -> Built:
    """Makes a session's samples and keeps them instead of those that the builder made before.

    Raises :class:`bridle.reconstruct.session.BrokenTree`, and ``KeyError`` for an unknown builder.
    """
    built = build(SessionTree.load(reader, session_id), policy, builder)
    now = time.time()
    rows = [
        {
            "id": new_id("sample"),
            "session_id": session_id,
            "builder": builder,
            "builder_version": BUILDER_VERSION,
            "policy": policy.as_data(),
            "leaf_call_id": sample.leaf_call_id,
            "segments": [[s.piece.span.id, s.piece.take, s.trains] for s in segments],
            "weight": sample.weight,
            "created_at": now,
        }
        for sample, segments in zip(built.samples, built.segments, strict=True)
    ]
    with transaction(reader.engine) as connection:
        connection.execute(
            delete(samples).where(samples.c.session_id == session_id, samples.c.builder == builder)
        )
        if rows:
            connection.execute(insert(samples), rows)
    return built


def derive_again(reader: Reader, session_id: str) -> int:
    """Makes a session's kept samples again, each set under its own policy; returns how many."""
    sets = {row["builder"]: row["policy"] for row in _rows(reader, session_id)}
    return sum(
        len(derive(reader, session_id, TrainablePolicy.from_data(policy), builder).samples)
        for builder, policy in sets.items()
    )


def kept_samples(
    reader: Reader, session_id: str, builder: str = "tree"
) -> tuple[TrainablePolicy | None, list[Sample]]:
    """The session's kept samples and their policy; ``None`` when none are kept.

    Raises :class:`bridle.reconstruct.session.BrokenTree` when they hang on spans that are not
    there.
    """
    rows = [row for row in _rows(reader, session_id) if row["builder"] == builder]
    if not rows:
        return None, []
    tree = SessionTree.load(reader, session_id)
    found = [
        assemble(tree.calls[row["leaf_call_id"]], _segments(tree, row["segments"]), row["weight"])
        for row in rows
    ]
    return TrainablePolicy.from_data(rows[0]["policy"]), found


def _segments(tree: SessionTree, stored: Sequence[Any]) -> list[Segment]:
    found: list[Segment] = []
    for span_id, take, trains in stored:
        row = tree.rows.get(span_id)
        if row is None:
            raise BrokenTree(f"a kept sample needs span {span_id}, which is missing")
        found.append(Segment(Piece(row, take), tuple((start, end) for start, end in trains)))
    return found


def _rows(reader: Reader, session_id: str) -> list[Any]:
    query = select(samples).where(samples.c.session_id == session_id)
    with reader.engine.connect() as connection:
        rows = connection.execute(query).mappings().all()
    order = {call.id: number for number, call in enumerate(reader.calls(session_id))}
    return sorted(rows, key=lambda row: (order.get(row["leaf_call_id"], -1), _choice(row)))


def _choice(row: Any) -> int:
    """The choice that ends the sample."""
    return int(row["segments"][-1][0].rsplit(".s", 1)[1])
