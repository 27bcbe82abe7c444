"""Decoding of rows into the values that were written, for the writer and the readers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
import orjson
from sqlalchemy import (
    JSON,
    ColumnElement,
    Connection,
    Row,
    Table,
    Text,
    bindparam,
    cast,
    select,
)

from bridle.store.encoding.bodies import (
    REQUEST,
    RESPONSE,
    Earlier,
    Packed,
    proved,
    texts_of,
    unpack_request,
    unpack_whole,
)
from bridle.store.encoding.packing import (
    unpack_experts,
    unpack_ids,
    unpack_kept,
    unpack_logprobs,
)
from bridle.store.errors import NotFound, RecordRejected
from bridle.store.reading.damage import Shapes
from bridle.store.records import (
    OBSERVED,
    Message,
    Span,
    SpanKind,
    ToolCall,
    VersionRun,
    span_id,
)
from bridle.store.schema.database import in_pieces
from bridle.store.schema.tables import bodies, call_messages, calls, spans, tool_sets


def json_as_text(table: Table) -> list[ColumnElement[Any]]:
    """Return the table's columns, JSON as its text.

    The reader of a row decides whether to decode it.
    """
    return [
        cast(column, Text).label(column.name) if isinstance(column.type, JSON) else column
        for column in table.columns
    ]


SPANS: Final = select(*json_as_text(spans), calls.c.session_id).join(
    calls, calls.c.id == spans.c.call_id
)
"""The query whose rows :func:`read_span` reads."""


def read_span(row: Sequence[Any]) -> Span:
    """Return the span of a row of ``SPANS``. Raise ``ValueError`` if it is damaged."""
    (call_id, choice, parent_call, parent_choice, start, _length, _finish, ids, logprobs,
     versions, kept, experts, _checksum, session_id) = row  # fmt: skip
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
            None if kept is None else unpack_kept(kept),
            None if experts is None else unpack_experts(experts),
        )
    except (ValueError, IndexError) as error:
        raise ValueError(f"span {identifier} is damaged: {error}") from error


def request_messages(connection: Connection, call_id: str) -> int:
    """Return the number of messages of a call's request.

    Raise :class:`RecordRejected` for an unknown call.
    """
    found = connection.execute(
        select(calls.c.request_messages).where(calls.c.id == call_id)
    ).first()
    if found is None:
        raise RecordRejected("an ended call was never begun in this store")
    return found[0] or 0


_LINK: Final[tuple[ColumnElement[Any], ...]] = (
    bodies.c.call_id,
    bodies.c.base_call_id,
    bodies.c.prefix,
    bodies.c.suffix,
    bodies.c.depth,
    bodies.c.data,
)


def request(connection: Connection, call_id: str) -> Earlier:
    """Return a call's request.

    Raise :class:`NotFound` if there is none, and ``ValueError`` if it is damaged.
    """
    a_request = bodies.c.part == REQUEST
    this = select(*_LINK).where(bodies.c.call_id == call_id, a_request)
    links = this.cte("links", recursive=True)
    links = links.union_all(
        select(*_LINK).join(links, (bodies.c.call_id == links.c.base_call_id) & a_request)
    )
    found = {row.call_id: row for row in connection.execute(select(links))}
    digest = connection.execute(
        select(calls.c.request_sha256).where(calls.c.id == call_id)
    ).scalar()
    if digest is None or call_id not in found:
        raise NotFound(f"no request of call {call_id}")
    chain: list[Row[Any]] = []
    link: str | None = call_id
    while link is not None:
        if link not in found:
            raise ValueError(f"the request of call {call_id} needs that of {link}")
        chain.append(found[link])
        link = found[link].base_call_id
    said = messages_of(connection, [row.call_id for row in chain])
    root = chain.pop()
    texts = texts_of(said[root.call_id].asked, tools_of(connection, root.call_id))
    data = unpack_whole(_packed(root), texts)
    for row in reversed(chain):
        replies = texts_of(said[row.base_call_id].replies)
        texts = texts_of(said[row.call_id].asked)
        data = unpack_request(_packed(row), data, replies, texts)
    replies = texts_of(said[call_id].replies)
    return Earlier(proved(data, digest), found[call_id].depth, replies)


def response(connection: Connection, call_id: str) -> bytes:
    """Return the bytes that were sent to the client. Raise as :func:`request` does."""
    query = (
        select(calls.c.response_sha256, *_LINK)
        .join(calls, calls.c.id == bodies.c.call_id)
        .where(bodies.c.call_id == call_id, bodies.c.part == RESPONSE)
    )
    row = connection.execute(query).first()
    if row is None or row.response_sha256 is None:
        raise NotFound(f"no response of call {call_id}")
    replies = messages_of(connection, [call_id])[call_id].replies
    return proved(unpack_whole(_packed(row), texts_of(replies)), row.response_sha256)


def _packed(row: Row[Any]) -> Packed:
    return Packed(row.prefix, row.suffix, row.depth, bytes(row.data))


class Said(NamedTuple):
    asked: tuple[Message, ...]
    """The messages of the request that are the call's own, without those of its base."""
    replies: tuple[Message, ...]
    """The reply of each choice."""


_MESSAGES: Final = (
    select(*json_as_text(call_messages))
    .where(call_messages.c.call_id.in_(bindparam("calls", expanding=True)))
    .order_by(call_messages.c.call_id, call_messages.c.choice, call_messages.c.position)
)
_MESSAGE_SHAPES: Final = Shapes(_MESSAGES.selected_columns)
_decode_calls: Final = msgspec.json.Decoder(tuple[ToolCall, ...]).decode


def messages_of(connection: Connection, call_ids: Sequence[str]) -> dict[str, Said]:
    asked: dict[str, list[Message]] = {call_id: [] for call_id in call_ids}
    replies: dict[str, list[Message]] = {call_id: [] for call_id in call_ids}
    for some in in_pieces(call_ids):
        rows = connection.execute(_MESSAGES, {"calls": some})
        for row in rows:
            _MESSAGE_SHAPES.check(row)
            call_id, choice, _, role, content, other, reasoning, tools, tool_id, name = row
            message = Message(
                role,
                content if other is None else orjson.loads(other),
                reasoning,
                () if tools is None else _decode_calls(tools),
                tool_id,
                name,
            )
            (asked if choice == OBSERVED else replies)[call_id].append(message)
    return {key: Said(tuple(asked[key]), tuple(replies[key])) for key in call_ids}


def tools_of(connection: Connection, call_id: str) -> list[dict[str, Any]]:
    """Return the definitions of the tools that a call had."""
    same = (tool_sets.c.session_id == calls.c.session_id) & (tool_sets.c.id == calls.c.tools_id)
    query = select(tool_sets.c.definitions).join(calls, same).where(calls.c.id == call_id)
    return connection.execute(query).scalar() or []
