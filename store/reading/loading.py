"""Rows read back as the values they were written from, for the writer and the readers alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import orjson
from sqlalchemy import (
    JSON,
    ColumnElement,
    Connection,
    Row,
    Select,
    Table,
    Text,
    cast,
    func,
    select,
)

from bridle.store.encoding.bodies import Body, BodyRow, Splice, decode, proved
from bridle.store.encoding.packing import unpack_ids, unpack_logprobs
from bridle.store.encoding.text_reader import PACKED, PackedTexts, TextReader
from bridle.store.errors import NotFound, RecordRejected
from bridle.store.records import Span, SpanKind, VersionRun
from bridle.store.schema.tables import bodies, calls, running, spans, templates
from bridle.store.tree import TokenTree
from bridle.store.writing.cache import OpenCall, SessionState, Template
from bridle.store.writing.rows import OBSERVED, span_id


def json_as_text(table: Table) -> list[ColumnElement[Any]]:
    """The table's columns, JSON as its text: who reads it decides whether it is decoded."""
    return [
        cast(column, Text).label(column.name) if isinstance(column.type, JSON) else column
        for column in table.columns
    ]


SPANS: Final = select(*json_as_text(spans), calls.c.session_id).join(
    calls, calls.c.id == spans.c.call_id
)
"""What :func:`read_span` reads."""


def read_span(row: Sequence[Any]) -> Span:
    """A row of ``SPANS``. Raises ``ValueError`` when it is damaged."""
    (call_id, choice, parent_call, parent_choice, start, _length, _finish, ids, logprobs,
     versions, _checksum, session_id) = row  # fmt: skip
    identifier = span_id(call_id, choice)
    try:
        return Span(
            identifier,
            session_id,
            call_id,
            None if parent_choice is None else span_id(parent_call or call_id, parent_choice),
            start,
            SpanKind.OBSERVED if choice == OBSERVED else SpanKind.SAMPLED,
            unpack_ids(ids),
            None if logprobs is None else unpack_logprobs(logprobs),
            () if versions == "[]" else tuple([VersionRun(*run) for run in orjson.loads(versions)]),
        )
    except (ValueError, IndexError) as error:
        raise ValueError(f"span {identifier} is damaged: {error}") from error


def token_tree(connection: Connection, session_id: str) -> TokenTree:
    """The session's tree as the database has it."""
    rows = connection.execute(SPANS.where(calls.c.session_id == session_id))
    return TokenTree(session_id, map(read_span, rows))


def span(connection: Connection, span_id: str) -> Span:
    """Raises :class:`NotFound`, and ``ValueError`` when it is damaged."""
    call_id, _, name = span_id.rpartition(".")
    choice = OBSERVED if name == "o" else int(name[1:])
    row = connection.execute(
        SPANS.where((spans.c.call_id == call_id) & (spans.c.choice == choice))
    ).first()
    if row is None:
        raise NotFound(f"no span {span_id}")
    return read_span(row)


def state(connection: Connection, session_id: str, texts: TextReader) -> SessionState:
    """What a writer needs to go on with a session that it does not remember."""
    loaded = SessionState()
    latest = connection.execute(
        select(calls.c.id, calls.c.request_body_id)
        .where(calls.c.session_id == session_id)
        .order_by(calls.c.started_at.desc())
        .limit(1)
    ).first()
    if latest is not None and latest.request_body_id is not None:
        loaded.remember_request(latest.id, request(connection, latest.id, texts))
    if latest is None:
        return loaded
    loaded.has_ended_calls = True
    for row in connection.execute(select(templates).where(templates.c.session_id == session_id)):
        context = texts.context(connection, session_id, row.id)
        template = Template(bytes(row.id), context, row.fields)
        loaded.templates[row.kind, row.vocabulary_id] = template
    return loaded


def open_call(connection: Connection, call_id: str) -> OpenCall:
    """A call that has not ended, as a writer knows it. Raises :class:`RecordRejected` when there
    is none."""
    headers = connection.execute(select(calls.c.headers).where(calls.c.id == call_id)).first()
    if headers is None:
        raise RecordRejected("an ended call was never begun in this store")
    return OpenCall(open_request(connection, call_id), headers[0])


def open_request(connection: Connection, call_id: str) -> Splice | None:
    """The splice of a call that has not ended; ``None`` when its request is stored whole."""
    found = connection.execute(select(running).where(running.c.call_id == call_id)).first()
    return None if found is None else Splice(found.prefix, found.suffix, bytes(found.data))


_LINK: Final = (
    *PACKED,
    calls.c.parent_call_id,
    calls.c.request_base_id,
    calls.c.request_depth,
    calls.c.request_body_id,
)


def request(connection: Connection, call_id: str, texts: TextReader) -> Body:
    """A call's request. Raises :class:`NotFound`, and ``ValueError`` when it is damaged."""
    links = select(*_LINK).where(calls.c.id == call_id).cte("links", recursive=True)
    base = func.coalesce(links.c.request_base_id, links.c.parent_call_id)
    links = links.union_all(
        select(*_LINK).join(links, (calls.c.id == base) & (links.c.request_depth > 0))
    )
    found = {row.id: row for row in connection.execute(select(links))}
    if call_id not in found or found[call_id].request_body_id is None:
        raise NotFound(f"no request of call {call_id}")
    known, data = texts.latest_request
    chain = [found[call_id]]
    while chain[-1].request_depth:
        base_id = chain[-1].request_base_id or chain[-1].parent_call_id
        if base_id == known:
            break
        if base_id not in found:
            raise ValueError(f"the request of call {chain[-1].id} needs that of {base_id}")
        chain.append(found[base_id])
    else:
        data = body(connection, chain.pop().request_body_id)
    for piece in _splices(connection, chain[::-1], texts):
        data = piece.apply(data)
    row = found[call_id]
    texts.latest_request = (call_id, proved(data, row.request_body_id))
    return Body(row.request_body_id, data, row.request_depth)


def _splices(connection: Connection, links: Sequence[Row[Any]], texts: TextReader) -> list[Splice]:
    """What these calls' requests add to their bases."""
    ended = [PackedTexts.of(row) for row in links if row.texts is not None]
    read = texts.read(connection, ended)
    found: list[Splice] = []
    for row in links:
        piece = read[row.id].request if row.id in read else open_request(connection, row.id)
        if piece is None:
            raise ValueError(f"the request of call {row.id} is missing")
        found.append(piece)
    return found


def response(connection: Connection, call_id: str, texts: TextReader) -> bytes:
    """What the client was sent. Raises as :func:`request` does."""
    query: Select[Any] = select(*PACKED, calls.c.response_body_id).where(calls.c.id == call_id)
    row = connection.execute(query).first()
    if row is None or row.response_body_id is None:
        raise NotFound(f"no response of call {call_id}")
    if row.texts is not None:
        reply = texts.read(connection, [PackedTexts.of(row)])[call_id].reply
        if reply is not None:
            return proved(reply.data, row.response_body_id)
    return body(connection, row.response_body_id)


def body(connection: Connection, body_id: str) -> bytes:
    """A body that is stored whole. Raises :class:`NotFound`, and ``ValueError`` when damaged."""
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
    return decode(chain[::-1])
