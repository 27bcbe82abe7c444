"""Rows read back as the values they were written from, for the writer and the readers alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import orjson
from sqlalchemy import JSON, ColumnElement, Connection, Table, Text, cast, select

from store.bodies import Body, BodyRow, decode
from store.cache import SessionState
from store.errors import NotFound
from store.packing import DICTIONARY, checksum, unpack, unpack_ids, unpack_json, unpack_logprobs
from store.records import Span, SpanKind, VersionRun
from store.schema import bodies, calls, spans
from store.tree import TokenTree

_KINDS: Final = {kind.value: kind for kind in SpanKind}


def json_as_text(table: Table) -> list[ColumnElement[Any]]:
    """The table's columns, JSON as its text: who reads it decides whether it is decoded."""
    return [
        cast(column, Text).label(column.name) if isinstance(column.type, JSON) else column
        for column in table.columns
    ]


SPANS: Final = select(*json_as_text(spans))
"""What :func:`read_span` reads."""


def span_checksum(span: Span) -> bytes:
    """8 bytes over everything that a span says: its place, its tokens, logprobs and versions."""
    place = f"{span.id}|{span.session_id}|{span.call_id}|{span.parent_id}|{span.start}|{span.kind}"
    versions = ";".join(f"{run.start}:{run.version}" for run in span.versions)
    logprobs = b"" if span.logprobs is None else _little(span.logprobs, "<f4")
    return checksum(place.encode(), versions.encode(), _little(span.token_ids, "<u4"), logprobs)


def read_span(row: Sequence[Any]) -> Span:
    """A row of ``SPANS``."""
    (span_id, session_id, call_id, parent_id, start, _length, kind, _choice, _finish, ids, logprobs,
     versions, _checksum) = row  # fmt: skip
    return Span(
        span_id,
        session_id,
        call_id,
        parent_id,
        start,
        _KINDS[kind],
        unpack_ids(ids),
        None if logprobs is None else unpack_logprobs(logprobs),
        () if versions == "[]" else tuple([VersionRun(*run) for run in orjson.loads(versions)]),
    )


def token_tree(connection: Connection, session_id: str) -> TokenTree:
    """The session's tree as the database has it."""
    rows = connection.execute(SPANS.where(spans.c.session_id == session_id))
    return TokenTree(session_id, map(read_span, rows))


def state(connection: Connection, session_id: str) -> SessionState:
    """What a writer needs to go on with a session that it does not remember."""
    loaded = SessionState(token_tree(connection, session_id))
    latest = connection.execute(
        select(calls.c.id, calls.c.request_body_id)
        .where(calls.c.session_id == session_id)
        .order_by(calls.c.started_at.desc())
        .limit(1)
    ).first()
    if latest is not None and latest.request_body_id is not None:
        loaded.remember_request(latest.id, body(connection, latest.request_body_id))
    return loaded


def body(connection: Connection, body_id: str) -> Body:
    """A body by its identifier. Raises :class:`NotFound`, and ``ValueError`` when it is damaged."""
    chain = body_chain(connection, body_id)
    return Body(body_id, decode(chain), chain[-1].depth)


def body_chain(connection: Connection, body_id: str) -> list[BodyRow]:
    """The rows that a body is spliced from, the whole one first."""
    links = select(bodies).where(bodies.c.id == body_id).cte("links", recursive=True)
    links = links.union_all(select(bodies).join(links, bodies.c.id == links.c.base_id))
    rows = {row.id: BodyRow(**row._mapping) for row in connection.execute(select(links))}
    if body_id not in rows:
        raise NotFound(f"no body {body_id}")
    chain: list[BodyRow] = []
    link: str | None = body_id
    while link is not None and link in rows:
        chain.append(rows[link])
        link = rows[link].base_id
    return chain[::-1]


def conversation(packed: bytes, request_row: bytes | None) -> dict[str, Any]:
    """``calls.conversation``, with ``bodies.data`` of the call's request."""
    leans = packed[0] == DICTIONARY and request_row is not None
    return unpack_json(packed, unpack(request_row) if leans and request_row else b"")


def _little(values: object, dtype: str) -> bytes:
    return np.ascontiguousarray(values, dtype=dtype).tobytes()
